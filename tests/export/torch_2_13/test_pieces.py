"""Each piece is still needed: torch shows its fault without the piece, and no fault with it."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import _meta_registrations
from torch._decomp import decompositions, global_decomposition_table
from torch._subclasses import fake_impls, fake_tensor
from torch.fx.experimental.sym_node import SymNode
from torch.nn import functional
from torch.torch_version import TorchVersion
from torch.utils._sympy.functions import FloorDiv

from pipeline.export import torch_2_13
from pipeline.export.torch_2_13 import PIECES, mended
from pipeline.spec.dims import Dim

NAMES = sys.modules[__name__].__dict__  # its functions only call int, as `whole` requires


class Of(torch.nn.Module):
    """A function of one tensor as a module."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Recurrent(torch.nn.Module):
    def __init__(self, kind: type[torch.nn.RNNBase]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = kind(4, 5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


@dataclass(frozen=True)
class Case:
    """The smallest module with a fault.

    Args:
        module: Makes the module.
        shape: The shape of its input, with a Dim for each dynamic size.
        longest: The most operations in the output's size.
        written: True to also write the program as ONNX and run it.
        refused: A part of torch's refusal with the piece; empty if it makes the program right.
    """

    module: Callable[[], torch.nn.Module]
    shape: tuple[int | Dim, ...]
    longest: int = 12
    written: bool = False
    refused: str = ""

    def fault(self) -> str:
        """The fault of torch's program under `PIECES`; empty if there is none."""
        module = self.module().eval()
        dynamic = {n: size for n, size in enumerate(self.shape) if isinstance(size, Dim)}
        declared = {("x", n): size for n, size in dynamic.items()}
        dims = {n: torch.export.Dim.DYNAMIC(min=d.min, max=d.max) for n, d in dynamic.items()}
        torch.manual_seed(1)
        try:
            with torch.no_grad(), mended(module, declared):
                program = torch.export.export(
                    module, (self.example(0),), dynamic_shapes=(dims,), strict=False
                )
            run = self.written_as_onnx(program) if self.written else program.module()
            ends = [n for n in program.graph.nodes if n.op in ("placeholder", "output")]
            said, sizes = ends[-1].args[0][0].meta["val"].shape, ends[-2].meta["val"].shape
            for step in range(1, 8):
                x = self.example(step)
                want, got = module(x), run(x)
                if got.shape != want.shape or not torch.allclose(got, want, 1e-4, 1e-5):
                    return f"another result at {tuple(x.shape)}"
                if [at(size, sizes, x.shape) for size in said] != list(want.shape):
                    return f"the size is said to be {said} and is {want.shape} at {x.shape}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        longest = max(int(s.node.expr.count_ops()) for s in said if isinstance(s, torch.SymInt))
        return f"a size of {longest} operations: {said}" if longest > self.longest else ""

    @staticmethod
    def written_as_onnx(
        program: torch.export.ExportedProgram,
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        with mended(program.graph_module, {}, during="torch.onnx.export"):
            done = torch.onnx.export(program, dynamo=True, opset_version=18, verbose=False)
        file = io.BytesIO()
        done.save(file)
        session = onnxruntime.InferenceSession(file.getvalue())
        (name,) = (i.name for i in session.get_inputs())
        return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])

    def example(self, step: int) -> torch.Tensor:
        """An input. The sizes cover the declared ranges; step 0 has the dims' opts."""
        return torch.randn(
            *(
                s.min + (s.opt - s.min + 7 * step) % (s.max - s.min + 1)
                if isinstance(s, Dim)
                else s
                for s in self.shape
            )
        )


def at(size, symbols, numbers) -> int:
    """The value of a size in torch's text, for numbers of the input's symbols."""
    if isinstance(size, int):
        return size
    values = {
        s.node.expr: n for s, n in zip(symbols, numbers, strict=True) if isinstance(s, torch.SymInt)
    }
    return int(size.node.expr.xreplace(values))


@dataclass(frozen=True)
class Spared(Case):
    """A module for which torch calls a function that takes long.

    Args:
        owner, name: The function, as an attribute.
        most: The most calls that are no fault.
    """

    owner: Any = torch.export.ExportedProgram
    name: str = "run_decompositions"
    most: int = 0
    written: bool = True

    def fault(self) -> str:
        calls = []
        own = getattr(self.owner, self.name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return own(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.owner, self.name, noted)
            other = super().fault()
        return other or (f"{len(calls)} calls of {self.name}" if len(calls) > self.most else "")


class SamePadding(torch.nn.Module):
    """Convolutions with TensorFlow's padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = torch.nn.ModuleList(torch.nn.Conv1d(3, 3, 3, 2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            size = x.shape[-1]
            pad = max((-(size // -2) - 1) * 2 + 3 - size, 0)
            x = conv(functional.pad(x, (pad // 2, pad - pad // 2)))
        return x


class Folded(torch.nn.Module):
    """A convolution whose weight is folded with a scale in each call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.scale = torch.nn.Parameter(torch.rand(4, 1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(x, self.conv.weight.data * self.scale.data, self.conv.bias)


class Clamped(Folded):
    """A convolution that limits its own weight in each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.conv.weight.data = self.conv.weight.data.clamp(-0.1, 0.1)
        return self.conv(x)


class Sampled(torch.nn.Module):
    """An image at half the size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, _, h, w = x.shape
        turn = torch.eye(2, 3)[None].expand(n, -1, -1)
        grid = functional.affine_grid(turn, [n, 3, h // 2, w], align_corners=False)
        return functional.grid_sample(x, grid, align_corners=False)


class Strided(torch.nn.Module):
    """A signal is padded to whole steps, whose length is in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("stride", torch.tensor(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.ceil(x.shape[-1] / self.stride).to(torch.int64)
        x = functional.pad(x, (0, steps * self.stride - x.shape[-1]))
        return x.reshape(1, 3, -1, int(self.stride))


class Padded(torch.nn.Module):
    """An encoder of rows that are padded."""

    def __init__(
        self, padding: Callable[[torch.Tensor], torch.Tensor], mask_check: bool = True
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(
            layer, 2, torch.nn.LayerNorm(8), mask_check=mask_check
        )
        self.encoder.requires_grad_(False)
        self.padding = padding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=self.padding(x))


def last(x: torch.Tensor) -> torch.Tensor:
    """Padding at the end of the second and the third row, and all of the fourth."""
    kept = x.shape[1] - torch.tensor([0, 1, 2, x.shape[1]])
    return torch.arange(x.shape[1]) >= kept[:, None]


class Experts(torch.nn.Module):
    """The first rows by a matrix of their group."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.linspace(-1, 1, 128).reshape(2, 8, 8).to(x)
        y = functional.grouped_mm(x, weights, offs=torch.tensor([1, 3], dtype=torch.int32))
        return torch.cat([y[:3], x])


CONSTANT = "specialized it to be a constant"
N, W = Dim("n", 4, 30, 50), Dim("w", 20, 31, 60)

FAULTS: dict[str, dict[str, Case]] = {
    "recurrent": {
        "LSTM": Case(lambda: Recurrent(torch.nn.LSTM), (3, N, 4), written=True),
        "GRU": Case(lambda: Recurrent(torch.nn.GRU), (3, N, 4), written=True),
    },
    "symbolic_steps": {
        "linspace": Case(lambda: Of(lambda x: x + torch.linspace(0, 1, x.shape[1])), (3, W)),
        "affine_grid": Case(
            lambda: Of(lambda x: functional.affine_grid(torch.eye(2, 3)[None], x.shape)),
            (1, 3, N, W),
        ),
        "cdist": Case(lambda: Of(lambda x: torch.cdist(x, x + 1)), (W, 4)),
        "kron": Case(lambda: Of(lambda x: torch.kron(x, x)), (3, W)),
        "take_along_dim": Case(lambda: Of(lambda x: x.take_along_dim(x.argsort(1), 1)), (N, W)),
        "torch.chunk": Case(lambda: Of(lambda x: torch.chunk(x, 2, 1)[0]), (3, W), written=True),
        "Tensor.chunk": Case(lambda: Of(lambda x: x.chunk(2, 1)[1]), (3, W), written=True),
        "Tensor.split": Case(
            lambda: Of(lambda x: x.split((x.shape[1] + 1) // 2, 1)[1]), (3, W), written=True
        ),
    },
    "whole": {
        "half a size": Case(lambda: Of(lambda x: x.new_zeros(int(x.shape[1] / 2))), (3, W)),
        "a size": Case(lambda: Of(lambda x: x.new_zeros(int(x.shape[1]))), (3, W)),
    },
    "lengths": {"a batch": Case(lambda: Of(lambda x: x.new_zeros(len(x), 3)), (W, 3))},
    "short_sizes": {"same padding": Case(SamePadding, (1, 3, W))},
    "slices": {
        "the first": Case(lambda: Of(lambda x: x[:, :30] * 2), (3, W), written=True),
        "the last": Case(lambda: Of(lambda x: x[:, -30:] * 2), (3, W), written=True),
    },
    "negative_divisors": {
        "half, rounded up": Case(
            lambda: Of(lambda x: x.new_zeros(-(x.shape[1] // 2 // -2))), (3, W)
        )
    },
    "padded_rows": {
        "at the end": Case(lambda: Padded(last), (4, N, 8), written=True),
        "at the end, or before it": Case(
            lambda: Padded(lambda x: last(x)[:3].roll(-(x.shape[1] % 2), 1)), (3, N, 8)
        ),
        "before the end, without a check": Case(
            lambda: Padded(lambda x: last(x)[:3].roll(1, 1), mask_check=False), (3, N, 8)
        ),
        "at the end, by floats": Case(
            lambda: Padded(lambda x: x.new_zeros(4, x.shape[1]).masked_fill(last(x), -torch.inf)),
            (4, N, 8),
        ),
    },
    "texts": {
        what: Case(
            lambda key=key: Of(lambda x: x + {"38": 1.0}.get(key(x), 0.0)), (3, W), refused=refused
        )
        for what, key, refused in [
            ("str", lambda x: str(x.shape[1]), CONSTANT),
            ("repr", lambda x: repr(x.shape[1]), CONSTANT),
            ("an f-string", lambda x: f"{x.shape[1]}", CONSTANT),
            ("format", lambda x: "{}".format(x.shape[1]), CONSTANT),  # noqa: UP032
            ("a part of a text", lambda x: f"{x.shape}"[15:17], CONSTANT),
            ("a float", lambda x: str(x.shape[1] / 2).replace("19.0", "38"), "Guard failed"),
        ]
    },
    "rounded": {
        "to tens": Case(lambda: Of(lambda x: x * round(x.shape[1], -1)), (3, W), refused=CONSTANT),
        **{
            f"a quotient with {name}": Case(lambda of=of: Of(of), (3, W), refused=refused)
            for name, of, refused in [
                ("a float", lambda x: x + x.shape[1] // 0.1, CONSTANT),
                ("a float above it", lambda x: x + 124.8 // (x.shape[1] * 0.1), "Guard failed"),
                ("a float of a size", lambda x: x + x.shape[1] * 0.7 // 0.1, "Guard failed"),
            ]
        },
    },
    "plain_data": {
        "a folded weight": Case(Folded, (2, 3, N, W), written=True),
        "a weight that is clamped": Case(Clamped, (2, 3, N, W), written=True),
    },
    "group_dtypes": {"float32": Case(Experts, (N, 8))},
    "decompose": {"a norm": Spared(lambda: torch.nn.BatchNorm2d(3), (2, 3, N, W))},
    "exact_constants": {
        "an epsilon": Case(lambda: Of(lambda x: (x.relu() + 1e-8).log()), (N, W), written=True),
        "an epsilon that is subtracted": Case(
            lambda: Of(lambda x: (x.relu() - 1e-9).sign()), (N, W), written=True
        ),
        "a factor": Case(lambda: Of(lambda x: (x * 0.999991 - x) * 1e5), (N, W), written=True),
        "a divisor": Case(lambda: Of(lambda x: (x / 1.000009 - x) * 1e5), (N, W), written=True),
    },
    "known_shapes": {
        "a batch norm": Spared(
            lambda: torch.nn.BatchNorm2d(3),
            (2, 3, N, W),
            owner=decompositions,
            name="native_batch_norm_helper",
        ),
        "grid_sample": Spared(Sampled, (2, 3, N, W), owner=decompositions, name="_grid_sampler_2d"),
    },
    "patterns": {
        "fifty nodes": Spared(
            lambda: torch.nn.Sequential(*[torch.nn.Tanh()] * 50),
            (N, W),
            owner=ir.Node,
            name="op_identifier",
            most=500,
        )
    },
    "size_tensors": {
        "a number in a buffer": Case(Strided, (1, 3, W), written=True),
        "a number of sizes": Case(
            lambda: Of(lambda x: x[:, : torch.tensor(x.shape).sum() // 2] * 2), (3, W), written=True
        ),
    },
}
EVERY = [(name, what) for name, cases in FAULTS.items() for what in cases]


def without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch_2_13, "PIECES", tuple(p for p in PIECES if p.name != name))


def test_every_piece_has_a_case_and_says_what_it_is_for() -> None:
    assert list(FAULTS) == [piece.name for piece in PIECES]
    for piece in PIECES:
        assert FAULTS[piece.name], piece.name
        assert piece.seen <= TorchVersion(torch.__version__)
        assert piece.needed_below is None or piece.needed_below > TorchVersion(piece.seen)
        assert piece.without.endswith(".") and len(piece.without.split()) <= 25
        assert all(at.startswith("https://github.com/") for at in piece.threads)
        assert importlib.util.find_spec(f"pipeline.export.torch_2_13.{piece.name}")


@pytest.mark.parametrize(("name", "what"), EVERY)
def test_torch_needs_the_piece_and_it_is_enough(monkeypatch, name: str, what: str) -> None:
    case = FAULTS[name][what]
    with monkeypatch.context() as patch:
        without(patch, name)
        assert case.fault(), (
            f"torch {torch.__version__} no longer needs the piece {name!r} for {what}: delete it"
        )
    # after a fault in this process, because torch may cache its results
    left = case.fault()
    assert case.refused in left if case.refused else left == ""


def test_a_torch_without_the_fault_is_left_alone(monkeypatch) -> None:
    (piece,) = (piece for piece in PIECES if piece.name == "negative_divisors")
    before = exchanged()
    for needed_below, applied in ((None, True), ("99.0", True), ("2.0", False)):
        monkeypatch.setattr(torch_2_13, "PIECES", (replace(piece, needed_below=needed_below),))
        with mended(torch.nn.Identity(), {}):
            assert (exchanged() != before) == applied


def exchanged() -> dict[str, Any]:
    """All functions and values that the pieces replace."""
    return {
        "SymNode.__init__": SymNode.__init__,
        "SymInt.__repr__": torch.SymInt.__repr__,
        "FloorDiv.eval": FloorDiv.__dict__["eval"].__func__,
        "int": NAMES.get("int"),
        "len": NAMES.get("len"),
        "slice": fake_impls._compute_slice_index,
        "kernels": fake_tensor.get_fast_op_impls,
        "grouped_mm": _meta_registrations._meta_grouped_mm_common,
        "modes": torch._C._len_torch_function_stack(),
        **{str(op): dict(op.py_kernels) for op in RECURRENT},
        "decompositions": {
            op: global_decomposition_table["post_autograd"].get(op) for op in RECURRENT
        },
    }


RECURRENT = (torch.ops.aten.lstm.input, torch.ops.aten.gru.input)
MODEL = Of(lambda x: x.new_zeros(int(x.shape[1])))


def test_everything_is_put_back() -> None:
    before = exchanged()
    with mended(MODEL, {}):
        inside = exchanged()
        assert all(inside[what] != value for what, value in before.items())
        with mended(MODEL, {}), mended(MODEL, {}, during="torch.onnx.export"):
            pass
        assert exchanged() == inside
    assert exchanged() == before


def test_everything_is_put_back_after_an_exception(monkeypatch) -> None:
    before = exchanged()
    with pytest.raises(ZeroDivisionError), mended(MODEL, {}), mended(MODEL, {}):
        raise ZeroDivisionError
    assert exchanged() == before
    # a piece that can't be applied, after all other pieces
    broken = replace(PIECES[0], apply=lambda *_: 1 // 0)
    monkeypatch.setattr(torch_2_13, "PIECES", (*PIECES, broken))
    with pytest.raises(ZeroDivisionError), mended(MODEL, {}):
        pass
    assert exchanged() == before


def test_importing_the_pipeline_neither_loads_nor_applies_a_piece() -> None:
    code = (
        "import pipeline, sys\n"
        "print([m for m in sys.modules if m in ('torch', 'sympy') or 'torch_2_13' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_pipeline_knows_the_face_only() -> None:
    """Only one place applies the pieces. To remove a piece, delete its module and its entry."""
    folder = Path(torch_2_13.__file__).parent
    for file in folder.parents[1].rglob("*.py"):
        if folder not in file.parents:
            for line in file.read_text(encoding="utf-8").splitlines():
                if "import" in line and "torch_2_13" in line:
                    assert line == "from pipeline.export.torch_2_13 import mended", file
