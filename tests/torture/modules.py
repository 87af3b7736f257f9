"""Modules that are written to slip through: they remember calls, or treat a rare size in another
way. Each one is converted, and every legal size of the result is compared with a fresh module."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forks import forked
from hypothesis import strategies as st

from pipeline.errors import PipelineError
from pipeline.graph.session import open_session
from pipeline.machine.python_file import run_python_file
from pipeline.spec.dims import kept_rules

LIMIT = 180.0
HEAD = """import collections, functools, itertools, math, types
import numpy as np
import torch

CALLS = 0
SEEN = []
"""
# where a value lives: code for __init__, an expression that reads it, a statement that writes V
KEPT = {
    "attribute": ("self.k = None", "self.k", "self.k = V"),
    "list": ("self.k = []", "(self.k[0] if self.k else None)", "self.k[:1] = [V]"),
    "dict": ("self.k = {}", "self.k.get('k')", "self.k['k'] = V"),
    "nested": ("self.k = types.SimpleNamespace(v=None)", "self.k.v", "self.k.v = V"),
    "submodule": ("self.m = torch.nn.Identity(); self.m.k = None", "self.m.k", "self.m.k = V"),
    "buffer": (
        "self.register_buffer('k', torch.full((), -1.0))",
        "(None if float(self.k) < 0 else float(self.k))", "self.k.fill_(V)",
    ),
    "data": (
        "self.k = torch.full((), -1.0)", "(None if float(self.k) < 0 else float(self.k))",
        "self.k.data.fill_(V)",
    ),
    "array": (
        "self.k = np.full(1, -1.0)", "(None if self.k[0] < 0 else float(self.k[0]))",
        "self.k[0] = V",
    ),
    "class": ("type(self).k = None", "type(self).k", "type(self).k = V"),
    "global list": ("SEEN.clear()", "(SEEN[0] if SEEN else None)", "SEEN[:1] = [V]"),
    "deque": ("self.k = collections.deque(maxlen=1)", "(self.k[0] if self.k else None)",
              "self.k.append(V)"),
    "partial": ("self.k = functools.partial(dict)", "self.k.keywords.get('k')",
                "self.k = functools.partial(dict, k=V)"),
}  # fmt: skip
# when it is written, with OLD for the present value
WHEN = {
    "once": "if OLD is None:",
    "if larger": "if OLD is None or OLD < V:",
    "if smaller": "if OLD is None or OLD > V:",
    "at even sizes": "if n % 2 == 0 or OLD is None:",
    "at a large size": "if n > 70 or OLD is None:",
}
VALUE = {"size": "float(n)", "batch": "float(x.shape[0])", "mean": "abs(float(x.mean()))",
         "root": "math.sqrt(n)"}  # fmt: skip
EFFECT = {"times": "x * (OLD / 16)", "plus": "x + OLD", "sign": "(x if OLD < 40 else -x)"}
COUNTS = {
    "attribute": ("self.c = 0", "self.c += 1", "self.c"),
    "list": ("self.c = []", "self.c.append(1)", "len(self.c)"),
    "iterator": ("self.c = itertools.count(); self.d = 0", "self.d = next(self.c)", "self.d"),
    "global": ("pass", "global CALLS; CALLS += 1", "CALLS"),
    "buffer": ("self.register_buffer('c', torch.zeros(()))", "self.c += 1", "float(self.c)"),
}
# another result at the sizes in R, without a state
RARE = {
    "comparison": "x + (1.0 if n in R else 0.0)",
    "table of texts": "x + {str(r): 1.0 for r in R}.get(str(n), 0.0)",
    "f-string": "x + (1.0 if f'{n}' in [f'{r}' for r in R] else 0.0)",
    "percent": "x + (1.0 if '%d' % n in ['%d' % r for r in R] else 0.0)",
    "shape text": "x + (1.0 if str(tuple(x.shape)).split(', ')[-1][:-1] in [str(r) for r in R] "
    "else 0.0)",
    "index": "x + T[n]",
    "exception": "x + bad(n)",
    "set of shapes": "x + (1.0 if any(tuple(x.shape) == (x.shape[0], 4, r) for r in R) else 0.0)",
    "remainder": "x + (1.0 if n % 41 in [r % 41 for r in R] else 0.0)",
    "exporting": "x + (1.0 if n in R and not torch.compiler.is_exporting() else 0.0)",
    "instance": "x + (1.0 if isinstance(n, int) and n in R else 0.0)",
    "hash": "x + (1.0 if hash((n, 4)) in [hash((r, 4)) for r in R] else 0.0)",
    "elements": "x + (1.0 if x[0].numel() in [4 * r for r in R] else 0.0)",
    "strides": "x + (1.0 if x.stride(1) in R else 0.0)",
    "division": "x + (1.0 if int(n / 3) in [int(r / 3) for r in R] else 0.0)",
    "bytes": "x + (1.0 if bytes(str(n), 'ascii') in [str(r).encode() for r in R] else 0.0)",
    "slice": "x + float('0123456789' * 20 and ('1' in str(n)[:1]))",
    "round": "x + round(n * 0.37)",
    "range": "x + (1.0 if n in range(min(R), min(R) + 2) else 0.0)",
    "match": "x + at(n)",
    "third": "x + (1.0 if n * (1 / 3) in [r * (1 / 3) for r in R] else 0.0)",
    "random": "torch.where(x.abs() > 3.9, torch.rand_like(x), x) + (n in R) * 0.0",
    "beside large": "torch.cat([x + (0.1 if n > R[0] else 0.0), x[..., : n // 8 + 1] * 1e6], 2)",
}
# what a call at rare sizes keeps shows only in a later call, whose result is Y
SELDOM = {
    "of one size": ["y = Y if OLD is not None else x", "if n == R:", "    W", "return y"],
    "of large sizes": ["y = Y if OLD is not None else x", "if n > R:", "    W", "return y"],
}
# branches at a size of 0, with B as a condition on another size
EMPTY = {
    "and": "y * 3 if n == 0 and B else y * 2",
    "or": "y * 2 if n or not (B) else y * 3",
    "least": "y * 3 if max(n, 1) != n and B else y * 2",
    "count": "y * 3 if x.numel() == 0 and B else y * 2",
    "length": "y * 3 if not len(range(n)) and B else y * 2",
}


@dataclass(frozen=True)
class Hostile:
    """A module as text.

    Args:
        kind: What it does, in words.
        source: The file, with a class ``Hostile``.
        remembers: True if its outputs depend on earlier calls.
        shape: The shape of its input.
        dims: The ranges of the dims in it.
    """

    kind: str
    source: str
    remembers: bool
    shape: tuple[str, ...] = ("b", "4", "n")
    dims: tuple[str, ...] = ("b=1:2:3", "n=8:32:96")


def _remembering(keep: str, when: str, value: str, effect: str) -> Hostile:
    init, read, write = KEPT[keep]
    if value == "mean" and keep == "partial":
        value = "size"
    made = VALUE[value]
    lines = [
        "n = x.shape[-1]",
        WHEN[when].replace("OLD", read).replace("V", f"({made})"),
        f"    {write.replace('V', f'({made})')}",
        f"return {EFFECT[effect].replace('OLD', read)}",
    ]
    return Hostile(f"keeps {value} in {keep} {when}: {effect}", _text(init, lines), True)


def _counting(keep: str, most: int, effect: str) -> Hostile:
    init, write, read = COUNTS[keep]
    last = {"sign": f"return x if {read} <= {most} else -x",
            "times": f"return x * (1 + {read} // {most})"}[effect]  # fmt: skip
    return Hostile(f"counts in {keep} to {most}: {effect}", _text(init, [write, last]), True)


def _rare(kind: str, sizes: tuple[int, ...]) -> Hostile:
    more = f"""
R = {sizes!r}
T = [float(n in R) for n in range(200)]

def bad(n):
    try:
        return [0.0][sum(n == r for r in R)]
    except IndexError:
        return 1.0

def at(n):
    match n:
        case {sizes[0]}:
            return 1.0
    return 0.0
"""
    return Hostile(f"{kind} at {sizes}", _text("pass", ["n = x.shape[-1]", f"return {RARE[kind]}"],
                                               more), False)  # fmt: skip


def _seldom(keep: str, form: str, effect: str, rare: int) -> Hostile:
    init, read, write = KEPT[keep]
    effects = {"sign": "-x", "plus": "x + 1"}
    lines = [
        line.replace("OLD", read).replace("W", write.replace("V", "n"))
        .replace("Y", effects[effect])
        for line in SELDOM[form]
    ]  # fmt: skip
    kind = f"keeps {form} in {keep}: {effect} with R = {rare}"
    return Hostile(kind, _text(init, ["n = x.shape[-1]", f"R = {rare}", *lines]), True)


def _empty(form: str, rare: int) -> Hostile:
    lines = ["b, m, n = x.shape", "y = x.sum(2) + 1"]
    lines.append(f"return {EMPTY[form].replace('B', f'm == {rare}')}")
    kind = f"empty, {form}: m == {rare}"
    dims = ("b=1:2:3", "m=8:12:96", "n=0:7:20")
    return Hostile(kind, _text("pass", lines), False, ("b", "m", "n"), dims)


# branches behind branches: A is a condition on a dim, B on others
NESTED = {
    "inside": ["if A:", "    if B: return x * 3", "return x * 2"],
    "otherwise": ["if not (A): return x * 2", "return x * 3 if B else x * 2"],
    "and": ["return x * 3 if (A) and (B) else x * 2"],
    "in two steps": ["k = 3 if B else 2", "return x * (k if A else 2)"],
    "known before": ["if B: x = x + 0", "if A: return x * 3 if B else x * 2", "return x * 2"],
    "odd widths": [
        "if not (A): return x * 2",
        "y = torch.nn.functional.pad(x[..., : n // 2 * 2], (0, n % 2)) * 2",
        "return y + R * 0",
    ],
    "caught": [
        "if not (A): return x * 2",
        "try: return x.view(b, m, -1, R % 7 + 5).flatten(2) * 3",
        "except RuntimeError: return x * 2",
    ],
    "three": ["if A:", "    if B:", "        if b == 3: return x * 3", "return x * 2"],
    "chosen": ["v = n if A else m", "return x * 3 if v == R else x * 2"],
    "larger": ["v = sorted([n, m + 60])[1]", "return x * 3 if v == R else x * 2"],
    "listed": ["v = [m, n][1 if A else 0]", "return x * 3 if v in (R, R + 1) else x * 2"],
    "beside": ["x = x * 2 if m % 2 == 0 else x + x", "return x * 3 if (A) and (B) else x"],
    "beside two": [
        "x = x * 2 if m * 6 > n else x + x",
        "x = x + 0 if n % 3 else x",
        "return x * 3 if (A) and (B) else x",
    ],
    "number": [
        "if not (A): return x * 2",
        "k = len([0] * (m // 4 * b))",
        "return x * 3 if k in (4, 9) and B else x * 2",
    ],
    "concluded": [
        "y = torch.nn.functional.unfold(x[:, None, :, : n // 8 * 8], (1, 8), stride=(1, 8))",
        "return x * 3 + y.sum() * 0 if A and B else x * 2 + y.sum() * 0",
    ],
    "loop": ["for d in (n, m):", "    if A and d == R: return x * 3", "return x * 2"],
    "tensor": ["y = x[:, :, : n // 2] if A else x", "if B: x = x + 1", "return x + y.sum() * 0"],
    "product": ["return x * (2 + bool(A) * bool(B))"],
    "symbols": ["return x * (2 + (n == R) * (m == 11))"],
    "alone": ["return x * 3 if x.squeeze(0).dim() == 2 and B else x * 2"],
}
OUTER = ("m == 12", "m == 11", "m == 8", "m == 16", "b == 1", "b == 3", "b % 2 == 1", "m > 13",
         "m < 11", "m % 4 == 1", "10 < m < 13", "m * 4 == n", "m == n", "b * m > 40",
         "m + n == 77", "n < 12")  # fmt: skip
INNER = ("n == R", "R - 6 < n < R + 6", "n > R", "n % 32 == R % 32", "n // 8 == R // 8",
         "n * b == R * 2", "n in (R, R + 3)", "R <= n * 2 <= R + 6", "max(n, m) == R",
         "len(range(n)) == R", "math.gcd(n, R) == R", "'%d' % n == str(R)", "round(n, -1) == 50",
         "n != R - 9 and 9 // (n - R + 9) == 1", "m == 11", "m * b == 22")  # fmt: skip


def _nested(form: str, outer: str, inner: str, rare: int) -> Hostile:
    lines = [line.replace("A", outer).replace("B", inner) for line in NESTED[form]]
    source = _text("pass", ["b, m, n = x.shape", f"R = {rare}", *lines])
    kind = f"{form}: {outer}, then {inner} with R = {rare}"
    return Hostile(kind, source, False, ("b", "m", "n"), ("b=1:2:3", "m=8:12:16", "n=8:32:96"))


def _text(init: str, forward: list[str], more: str = "") -> str:
    body = "\n".join(f"        {line}" for line in forward)
    return f"""{HEAD}{more}

class Hostile(torch.nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, x):
{body}
"""


HOSTILE = st.one_of(
    st.builds(
        _remembering, st.sampled_from(sorted(KEPT)), st.sampled_from(sorted(WHEN)),
        st.sampled_from(sorted(VALUE)), st.sampled_from(sorted(EFFECT)),
    ),
    st.builds(_counting, st.sampled_from(sorted(COUNTS)), st.integers(2, 120),
              st.sampled_from(["sign", "times"])),
    st.builds(_rare, st.sampled_from(sorted(RARE)),
              st.lists(st.integers(8, 96), min_size=1, max_size=2, unique=True).map(tuple)),
    st.builds(_nested, st.sampled_from(sorted(NESTED)), st.sampled_from(OUTER),
              st.sampled_from(INNER), st.integers(18, 96)),
    st.builds(_seldom, st.sampled_from(sorted(KEPT)), st.sampled_from(sorted(SELDOM)),
              st.sampled_from(["sign", "plus"]), st.integers(8, 96)),
    st.builds(_empty, st.sampled_from(sorted(EMPTY)), st.integers(8, 96)),
)  # fmt: skip


def converted(hostile: Hostile, folder: Path) -> str:
    """Converts the module, and compares every legal size. Returns the verdict.

    Returns:
        ``refused``, ``right``, or ``wrong: ...``.
    """
    from pipeline.convert.driver import run
    from pipeline.spec.config import Config

    file = folder / "hostile.py"
    file.write_text(hostile.source)
    shape = "x".join(size if size.isdigit() else f"{{{size}}}" for size in hostile.shape)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            report = run(Config(f"{file}:Hostile", inputs=(f"x:{shape}",), dims=hostile.dims,
                                out=folder / "artifact"))  # fmt: skip
    except PipelineError as error:
        return f"refused: {error}"
    dims = report.manifest.interface.dims
    session = open_session(folder / "artifact" / "model.onnx", one_thread=True)
    names = [i.name for i in session.get_inputs()]
    module = run_python_file(file, "again").Hostile().eval()
    values = np.random.default_rng(1)
    sets = list(itertools.product(*(range(d.min, d.max + 1, d.multiple_of) for d in dims.values())))
    values.shuffle(sets)
    for row in sets:
        sizes = {**dict.fromkeys("bmn", 2), **dict(zip(dims, map(int, row), strict=True))}
        if not kept_rules(report.manifest.interface.rules, sizes):
            continue
        shape_now = [int(size) if size.isdigit() else sizes[size] for size in hostile.shape]
        x = values.standard_normal(shape_now).astype(np.float32)
        (got,) = session.run(None, {names[0]: x})
        with torch.no_grad():
            fresh = run_python_file(file, "fresh").Hostile().eval()(torch.from_numpy(x)).numpy()
            used = module(torch.from_numpy(x)).numpy()
        for what, want in (("a first call", fresh), ("a later call", used)):
            if want.shape != got.shape or not np.allclose(got, want, 1e-3, 1e-4):
                return f"wrong: {what} at {sizes}"
    return "right"


def verdict(hostile: Hostile) -> dict[str, Any]:
    """The result for one module, from a process of its own."""
    with tempfile.TemporaryDirectory(prefix="torture-") as name:
        done = forked(converted, hostile, Path(name), limit=LIMIT)
    result = done.result or ""
    return {
        "what": hostile.kind,
        "verdict": "failed" if done.failure else result.partition(":")[0],
        "text": done.failure or result,
        "seconds": round(done.seconds, 1),
        "source": hostile.source if done.failure or result.startswith("wrong") else "",
    }


def bad(result: dict[str, Any]) -> bool:
    """True for a silently wrong artifact, a traceback, a hang or a crash."""
    return result["verdict"] not in ("refused", "right")


def prepare() -> None:
    """Loads what every conversion needs, before the forks."""
    import pipeline.convert.driver
    import pipeline.export.export  # noqa: F401

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


def strategy() -> st.SearchStrategy[Hostile]:
    return HOSTILE


def every() -> Iterator[Hostile]:
    """One of each kind, for a short run."""
    for keep in KEPT:
        yield _remembering(keep, "once", "size", "times")
    for keep in COUNTS:
        yield _counting(keep, 100, "sign")
    for kind in RARE:
        yield _rare(kind, (61,))
    for form in NESTED:
        yield _nested(form, "m == 12", "n == R", 61)
    for form in SELDOM:
        yield _seldom("attribute", form, "sign", 61)
    for form in EMPTY:
        yield _empty(form, 61)
