"""Finding the sizes that a module accepts: each kind of rule, on a module with that rule."""

from __future__ import annotations

import itertools
import traceback

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeline.probe.eager import model_line
from pipeline.probe.probe import Probed, probe
from pipeline.probe.sample_sizes import examples
from pipeline.probe.search import Search
from pipeline.probe.torch_runner import TorchProbe
from pipeline.spec.dims import Dim, kept_rules
from pipeline.spec.tensors import Input

B, H, W = Dim("b", 1, 2, 16), Dim("h", 1, 224, 1024), Dim("w", 1, 256, 1024)
IMAGE = (B, 3, H, W)


class UNet(nn.Module):
    """Four levels with plain skips: each size must be divisible by 16."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 4, 4, 4, 4]
        self.down = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(widths)
        )
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(4))

    def forward(self, x):
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))  # the skip
        return x


class Windows(nn.Module):
    """Attention in windows of 7 patches of 4. The convolution drops an incomplete patch."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 4, 4, 4)

    def forward(self, x):
        x = self.patch(x)
        b, c, h, w = x.shape
        return x.view(b, c, h // 7, 7, w // 7, 7).transpose(3, 4)


class Positions(nn.Module):
    """A table of 100 positions. A run with shapes only does not show its end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 8)

    def forward(self, x):
        return x + self.table(torch.arange(x.shape[1]))


class Cached(nn.Module):
    """A table of 128 positions for past and new tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(128, 8))

    def forward(self, x, past):
        start = past.shape[1]
        now = x + self.table[torch.arange(start, start + x.shape[1])]
        return torch.cat([past, now], 1)


class Tokens(nn.Module):
    """A table of 1600 positions for the whole image."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(1600, 3))

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        return tokens + self.table[torch.arange(tokens.shape[1])]


class Remembers(nn.Module):
    """Keeps a mask of the first size. Each try must use a fresh module."""

    mask = None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(x.shape[2:])
        return x * self.mask


def patches(x):
    if x.shape[2] % 16 or x.shape[3] % 16:
        raise ValueError("the image is no multiple of 16\nand so on")  # the line of patches
    return F.avg_pool2d(x, 16)


def odd(x):
    y = F.interpolate(F.max_pool2d(x, 3, 2), scale_factor=2)
    return torch.cat([x[:, :, 1:, 1:], y], 1)


def reflected(x):
    return F.pad(x, (10, 10, 10, 10), mode="reflect")


def square(x):
    return x @ x


def batch_of_four(x):
    return x.view(4, 3, *x.shape[2:])


def clips(x):
    return x.view(x.shape[0] // 4, 4, *x.shape[1:]).mean(1)


def padded_inside(x):
    h, w = x.shape[2:]
    return F.avg_pool2d(F.pad(x, (0, -w % 8, 0, -h % 8)), 8)


def one_row_left(x):
    if x.shape[2] % 32 == 1:
        raise ValueError("one row is left")
    return x * 2


def groups(x):
    return x.flatten(2).unflatten(2, (64, -1))


def uneven(x):
    if x.shape[2] % 11 in (1, 4, 9):
        raise ValueError("uneven")
    return x * 2


def never(x):
    raise ValueError(f"no {x.ndim}-dimensional image")


def wrap(function) -> nn.Module:
    class Module(nn.Module):
        def forward(self, *args):
            return function(*args)

    return Module()


def tried(module, *shapes, rules=(), seconds=60.0, **options) -> Probed:
    torch.manual_seed(0)
    module = module() if isinstance(module, type) else wrap(module)
    inputs = [Input(f"x{k}", shape, **options) for k, shape in enumerate(shapes or (IMAGE,))]
    return probe(inputs, module, 0, rules, seconds)


@pytest.mark.parametrize(
    ("module", "rules"),
    [
        (UNet, {"h": (16, 1024, 16, 0), "w": (16, 1024, 16, 0)}),
        (patches, {"h": (16, 1024, 16, 0), "w": (16, 1024, 16, 0)}),
        (odd, {"h": (3, 1023, 2, 1), "w": (3, 1023, 2, 1)}),
        (reflected, {"h": (11, 1024, 1, 0), "w": (11, 1024, 1, 0)}),
        (batch_of_four, {"b": (4, 4, 1, 0)}),
        (clips, {"b": (4, 16, 4, 0)}),
    ],
)
def test_a_rule_that_a_dim_can_say_is_found_exactly(module, rules) -> None:
    found = tried(module)
    assert found.complete
    assert not found.joint
    said = {p.dim.name: p.rule.refined for p in found.probes if p.rule is not None}
    assert {n: (d.min, d.max, d.multiple_of, d.offset) for n, d in said.items()} == rules
    for p in found.probes:
        assert p.taken
        assert (p.rule is None) == (not p.refused)
        if p.rule is not None:
            assert ": the model fails at " in p.rule.text()
            assert p.rule.failed is not None
            assert p.rule.failed.sizes[p.dim.name] not in p.taken
            assert "test_probe.py:" in p.rule.line
            p.rule.refined.check(p.rule.refined.opt)


def test_the_rule_quotes_the_models_first_line_and_where_it_is() -> None:
    rule = tried(patches).rules[0]
    assert rule.kind == "multiple"
    assert rule.text() == (
        "h must be a multiple of 16: the model fails at h=56: the image is no multiple of 16"
    )
    assert "\n" not in str(rule)
    assert "the line of patches" in rule.line
    assert 'Dim("h", min=16, opt=224, max=1024, multiple_of=16)' in rule.advice()


@pytest.mark.parametrize("module", [padded_inside, Remembers, nn.Identity])
def test_no_rule_where_every_size_runs(module) -> None:
    found = tried(module)
    assert found.rules == []
    assert found.words.startswith("every size that was tried runs")
    for p in found.probes:  # consecutive sizes, so that no multiple is missed, and both ends
        assert set(range(p.dim.min, min(p.dim.max, 64) + 1)) <= set(p.taken)
        assert p.dim.max in p.taken


def test_a_model_that_drops_a_rest_takes_more_than_multiples() -> None:
    for rule, name in zip(tried(Windows).rules, "hw", strict=True):
        assert rule.size_rule == f"{name} % 28 < 4"
        assert (rule.refined.min, rule.refined.multiple_of, rule.refined.offset) == (28, 28, 0)


def test_sizes_between_that_fail() -> None:
    (rule,) = tried(one_row_left).rules
    assert rule.size_rule == "h % 32 != 1"
    assert rule.refined is None
    (rule,) = tried(uneven).rules
    assert (rule.kind, rule.refined, rule.size_rule) == ("irregular", None, "")
    assert "h can't be 1, 4, 9, " in rule.text()
    assert "of the" in rule.text()
    assert "sizes that were tried fail, and 2, 3, 5, 6, " in rule.text()
    assert "all sizes run, such as " in rule.advice() and "--search-seconds N" in rule.advice()
    low, high = map(int, rule.advice().partition("such as ")[2].partition(":")[0].split(".."))
    assert high > low and not {n % 11 for n in range(low, high + 1)} & {1, 4, 9}


@pytest.mark.parametrize(
    ("module", "shapes", "text"),
    [
        (square, (), "h == w"),
        (Cached, ((B, Dim("seq", 1, 16, 128), 8), (B, Dim("past", 0, 32, 128), 8)),
         "seq + past <= 128"),
        (Tokens, (), "h*w <= 1600"),
        (groups, ((2, 3, Dim("h", 1, 64, 200), Dim("w", 1, 64, 200)),), "(h*w) % 64 == 0"),
    ],
)  # fmt: skip
def test_what_two_dims_keep_together(module, shapes, text) -> None:
    found = tried(module, *shapes)
    (rule,) = found.rules
    assert rule.size_rule == text
    assert rule.refined is None
    assert rule.kind == ("equal" if text == "h == w" else "relation")
    advice = rule.advice()
    assert "one Dim for both h and w" in advice if text == "h == w" else text in advice
    assert kept_rules([text], found.base)
    # with the declared rule, no other rule is found, and no size that breaks it is tried
    again = tried(module, *shapes, rules=(text,))
    assert again.rules == []


def test_three_dims_that_fail_together_though_their_pairs_run() -> None:
    shape = (Dim("b", 1, 2, 2), 4, Dim("h", 1, 2, 3), Dim("w", 1, 2, 3))
    (rule,) = tried(nn.GroupNorm(4, 4), shape).rules
    assert (rule.kind, rule.size_rule, rule.dims) == ("relation", "b*h*w >= 2", ("b", "h", "w"))

    def corners(x):
        if (x.shape[0] + x.shape[2] + x.shape[3]) % 7 == 0 and x.shape[0] == 2:
            raise ValueError("no")
        return x

    for rule in tried(corners, shape).rules:
        assert rule.text() and rule.advice()


def test_equal_dims_have_their_own_rule_too() -> None:
    def cells(x):
        return (x @ x).unflatten(2, (8, -1))

    rules = tried(cells).rules
    assert [rule.size_rule for rule in rules] == ["", "", "h == w"]
    assert all(rule.refined.multiple_of == 8 for rule in rules[:2])


def test_values_are_what_counts() -> None:
    """A run with shapes only ignores a table's length."""
    (rule,) = tried(Positions, (B, Dim("n", 1, 64, 2048), 8)).rules
    assert (rule.refined.min, rule.refined.max) == (1, 100)
    assert "index out of range" in rule.text()


def test_the_size_that_is_named_fails_for_the_last_reason() -> None:
    """80 is a multiple of 16, so it shows why a size must be a multiple of 32."""

    def halves(x):
        if x.shape[2] % 16:
            raise ValueError("not divisible by 16")
        most = x[:, :, ::16]
        return most + most[:, :, ::2].repeat_interleave(2, 2)

    (rule,) = tried(halves).rules
    assert rule.kind == "multiple" and rule.multiple == 32
    assert rule.failed is not None and rule.failed.sizes["h"] % 32 == 16
    assert "must match" in rule.text() and "divisible by 16" not in rule.text()


def test_a_module_that_never_runs_is_said_so() -> None:
    found = tried(never)
    (rule,) = found.rules
    assert found.base is None
    assert rule.kind == "nowhere"
    assert "runs at none of the" in rule.text()
    assert "no 4-dimensional image" in rule.text()
    assert "other fixed sizes (such as channels), axes or dtypes" in rule.advice()
    assert "test_probe.py:" in rule.line


def test_a_size_that_only_the_error_tells_is_found() -> None:
    def only(x):
        assert x.shape[2] == 211 == x.shape[3], "expected an image of 211"
        return x

    found = tried(only)
    assert {p.dim.name: p.rule.refined.min for p in found.probes if p.rule} == {"h": 211, "w": 211}


def test_without_the_time_nothing_is_claimed() -> None:
    found = tried(UNet, seconds=0.1)
    assert not found.complete
    assert found.seconds < 5
    assert all(rule.refined is None for rule in found.rules)
    assert "time ran out before all were tried" in found.words


def test_the_module_and_the_threads_are_left_as_they_were() -> None:
    module, threads = Remembers(), torch.get_num_threads()
    probe([Input("x", IMAGE)], module, 0, (), 5.0)
    assert module.mask is None
    assert torch.get_num_threads() == threads


def test_a_library_whose_folder_begins_as_torchs_does_is_the_model() -> None:
    frames = [
        traceback.FrameSummary("/lib/torch/nn/module.py", 1, "call", line="f()"),
        traceback.FrameSummary("/lib/torchvision/net.py", 2, "forward", line="g()"),
        traceback.FrameSummary("/lib/torch/functional.py", 3, "cat", line="h()"),
    ]
    line = model_line(traceback.StackSummary.from_list(frames), "/lib/torch")
    assert line == "/lib/torchvision/net.py:2 in forward: g()"


@pytest.mark.parametrize(
    "rules", [("h == w",), ("(h*w) % 64 == 0",), ("h == 2*w",), ("h % 28 < 4", "w % 28 < 4")]
)
def test_examples_keep_the_rules(rules) -> None:
    for sizes in examples([Input("x", IMAGE)], rules):
        assert kept_rules(rules, sizes)
        assert sizes["b"] > 1


class Remainder(nn.Module):
    """A table of 31 rows for remainders of 32: torch.export sees no rule."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(31, 4)

    def forward(self, x):
        return x + self.table(torch.tensor((x.shape[2] + 11) % 32)).sum()


def test_a_band_below_each_multiple_is_found_from_a_few_sizes() -> None:
    """As in YOLO: the sizes of two levels round up to the same."""

    def levels(x):
        if 0 < x.shape[2] % 32 < 25:
            raise ValueError("6 is not 5")
        return x * 2

    (rule,) = tried(levels, (1, 3, Dim("h", 64, 192, 320), 64)).rules
    assert rule.refined is not None
    assert (rule.refined.min, rule.refined.max, rule.refined.multiple_of) == (64, 320, 32)


@pytest.mark.parametrize("brief", [False, True])
def test_a_rare_remainder_is_found(brief: bool) -> None:
    def rare(x):
        assert x.shape[2] % 32 != 20
        return x

    inputs = [Input("x", (B, 4, Dim("n", 8, 32, 96)))]
    for module in (Remainder(), wrap(rare)):
        (rule,) = probe(inputs, module, 0, (), 60.0, brief=brief).rules
        assert rule.size_rule == "n % 32 != 20"


def test_a_run_as_shapes_leaves_the_next_one_alone() -> None:
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("m", torch.zeros(4))

        def forward(self, x):
            if self.m.shape[0] < x.shape[0]:
                self.m.resize_(x.shape[0])
            return x + self.m[: x.shape[0]]

    runner = TorchProbe([Input("x", (Dim("n", 1, 8, 32),))], Grows(), 0)
    assert [runner.shapes({"n": n}) for n in (8, 16, 8, 3)] == [True] * 4


@pytest.mark.parametrize("step", [8, 14, 32])
def test_common_multiples_are_tried_before_their_neighbours(step: int) -> None:
    tried: list[int] = []

    def takes(size: int) -> bool:
        tried.append(size)
        return size % step == 0

    base = 7 * step
    search = Search(range(1, 1025), base, takes)
    search.explore()
    assert search.step == step
    first = next(size for size in tried if size != base and size % step == 0 and size > step)
    before = tried[: tried.index(first)]
    assert not {base + 5, base + 6, base + 7} & set(before)  # neighbours that are no multiple
