"""Keeps the numbers known that a model computes from its sizes in small tensors.

Some models keep a stride or a kernel's size in a buffer, and compute a padding as
``torch.ceil((length - self.kernel) / self.stride)``. These are tensors, and while torch traces,
tensors have no values. So ``F.pad(x, (0, padding))``, ``int(self.kernel)`` and a branch on such a
number depend on data for torch, and it refuses them (torch 2.13). Under `SizeTensors` the same
arithmetic is done beside the tensors, in integers and fractions of sizes. A call that needs a
number takes it.

Known are buffers and constants of at most `_MOST` integers, tensors that ``forward`` makes of
sizes, and what the functions here compute from both. A number is no longer known after a write into
its tensor, where float32 could round it, and where its integer type could overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from pipeline.export.asked import decide
from pipeline.export.declared import ends_of
from pipeline.export.torch_2_13.size_numbers import (
    ALL,
    EXACT,
    ONE,
    SWAPPED,
    TWO,
    Number,
    Unknown,
    by_one,
    by_two,
    cut,
    largest,
    listed,
    read,
    reduced,
    smallest,
    whole_quotient,
)

_MOST = 16
_FLOATS = (torch.float32, torch.float64)
_INTEGERS = {torch.int32: 1 << 31, torch.int64: 1 << 63}  # the others overflow at small numbers
_SOURCES = ("scalar_tensor", "as_tensor", "tensor")
_SAME = (  # if the dtype of the result can hold them
    "clone", "detach", "contiguous", "reshape", "view", "flatten", "squeeze", "unsqueeze",
    "to", "type", "int", "long", "float", "double",
)  # fmt: skip
_TAKE_NUMBERS = {  # with the first argument that may be a number
    "zeros": 0, "ones": 0, "full": 0, "empty": 0, "arange": 0, "linspace": 0, "eye": 0,
    "new_zeros": 1, "new_ones": 1, "new_full": 1, "new_empty": 1,
    "pad": 1, "reshape": 1, "view": 1, "expand": 1, "repeat": 1, "tile": 1, "unflatten": 1,
    "broadcast_to": 1, "narrow": 1, "split": 1, "interpolate": 1, "roll": 1,
    "adaptive_avg_pool1d": 1, "adaptive_avg_pool2d": 1, "adaptive_avg_pool3d": 1,
    "adaptive_max_pool1d": 1, "adaptive_max_pool2d": 1, "adaptive_max_pool3d": 1,
}  # fmt: skip
_ASKED = ("item", "__bool__", "__int__", "__index__", "__float__")
_COMPUTED = frozenset(
    {*_SOURCES, *_SAME, *ONE, *TWO, *SWAPPED, *ALL, "stack", "unbind", "__getitem__", "clamp"}
)
_PURE = frozenset(  # functions that don't write into their arguments
    {*_COMPUTED, *_TAKE_NUMBERS, *_ASKED, "__get__", "size", "dim", "numel", "tolist", "__len__"}
)


class SizeTensors(TorchFunctionMode):
    """While it is active, these numbers are known.

    Args:
        module: the model, before torch replaces its buffers by tensors without values.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._module = module
        self._values = {
            name: read(buffer) for name, buffer in module.named_buffers() if _is_small(buffer)
        }
        self._buffers: dict[str, torch.Tensor] = {}  # torch's, as they are when `module` is called
        self._running = False
        self._wrote = False  # into a small integer tensor
        self._known = WeakIdKeyDictionary()  # a tensor's numbers, and its version then

    def __enter__(self) -> Any:
        # before the module's own hooks, which may replace buffers
        self._hook = self._module.register_forward_pre_hook(self._called, prepend=True)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        self._hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _called(self, module: torch.nn.Module, _: object) -> None:
        if self._running:  # it calls itself, and may have replaced some
            return
        self._running = True
        self._buffers = {
            name: buffer for name, buffer in module.named_buffers() if name in self._values
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for each function of its API."""
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "") if _is_torchs(func) else ""
        if self._running and _may_write(func, name, kwargs):
            self._wrote = self._wrote or _has_small([*args, *kwargs.values()])
        if name in _TAKE_NUMBERS:
            first = _TAKE_NUMBERS[name]
            args = (*args[:first], *(self._filled(arg) for arg in args[first:]))
            kwargs = {key: self._filled(value) for key, value in kwargs.items()}
        elif name in _ASKED and len(args) == 1 and not kwargs:
            answer = self._answer(name, args[0])
            if answer is not None:
                return answer
        elif func is torch.as_tensor and args and _has_sizes(args[0]):
            func = torch._refs.tensor  # torch replaces torch.tensor so, and bakes sizes in here
        result = func(*args, **kwargs)
        if name in _COMPUTED and args:
            self._compute(name, args, kwargs, result)
        return result

    def _answer(self, name: str, tensor: torch.Tensor) -> Any:
        """The one number of a tensor in the type that the function gives; None if unknown."""
        found = self._numbers(tensor)
        value = None if found is None or found.size != 1 else _plain(found.item(), tensor.dtype)
        if value is None or name == "item":
            return value
        if name == "__bool__":
            truth = value if isinstance(value, (bool, torch.SymBool)) else value != 0
            return decide(truth) if isinstance(truth, torch.SymBool) else bool(truth)
        if not isinstance(value, (int, float)):
            return None  # Python takes no SymInt
        return float(value) if name == "__float__" else int(value)

    def _filled(self, value: Any) -> Any:
        """An argument with the known numbers in place of their tensors."""
        if isinstance(value, (tuple, list)):
            filled = [self._filled(one) for one in value]
            same = all(a is b for a, b in zip(value, filled, strict=True))
            return value if same else type(value)(filled)
        if not isinstance(value, torch.Tensor) or value.dim() or value.dtype not in _INTEGERS:
            return value
        found = self._answer("item", value)
        return value if found is None else found

    def _compute(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Keeps the numbers of a result."""
        try:
            found = self._result(name, args, kwargs, result)
            tensors = result if name == "unbind" else (result,)
            for tensor, numbers in zip(tensors, found, strict=True):
                kept = self._kept(tensor, np.asarray(numbers, dtype=object))
                if kept is not None:
                    self._known[tensor] = (kept, _version(tensor))
        except Unknown:
            pass

    def _result(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Iterable[np.ndarray]:
        """The numbers of each tensor of a result."""
        if name in _SOURCES:
            return (listed(args[0]),)
        if name in _SAME and not (name == "view" and _names_dtype([*args[1:], *kwargs.values()])):
            return (self._operand(args[0]),)
        if kwargs.get("out") is not None or kwargs.get("dtype") is not None:
            raise Unknown
        if name == "unbind":
            return self._parts(*args, **kwargs)
        special: dict[str, Callable[..., np.ndarray]] = {
            "stack": self._stacked, "clamp": self._clamped, "__getitem__": self._at
        }  # fmt: skip
        own = special.get(name)
        if own is not None:
            return (own(*args, **kwargs),)
        if len(args) == 1 and not kwargs:
            return (self._of_one(name, self._operand(args[0])),)
        return (self._of_two(name, args, kwargs, result),)

    def _parts(self, tensor: torch.Tensor, dim: int = 0) -> Iterable[np.ndarray]:
        found = self._operand(tensor)
        if dim != 0:
            raise Unknown
        return found

    def _at(self, tensor: torch.Tensor, index: Any) -> np.ndarray:
        found = self._operand(tensor)
        for one in index if isinstance(index, tuple) else (index,):
            parts = (one.start, one.stop, one.step) if isinstance(one, slice) else (one,)
            if not all(part is None or part is ... or type(part) is int for part in parts):
                raise Unknown
        chosen: np.ndarray = np.asarray(found[index], dtype=object)
        return chosen

    def _of_one(self, name: str, numbers: np.ndarray) -> np.ndarray:
        if name in ALL:
            return reduced(ALL[name], numbers)
        if name not in ONE:
            raise Unknown
        return by_one(ONE[name], numbers)

    def _of_two(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> np.ndarray:
        if len(args) != 2 or kwargs.keys() - {"rounding_mode"}:
            raise Unknown
        a, b = self._operands(args, result)
        if name in SWAPPED:
            return by_two(SWAPPED[name], b, a)
        rounding = kwargs.get("rounding_mode")
        function = whole_quotient if rounding == "floor" else TWO.get(name)
        if function is None or rounding not in (None, "floor"):
            raise Unknown
        return by_two(function, a, b)

    def _clamped(self, tensor: torch.Tensor, min: Any = None, max: Any = None) -> np.ndarray:
        found = self._operand(tensor)
        if min is not None:
            found = by_two(largest, *self._operands((tensor, min), tensor))
        if max is None:
            return found
        self._operands((tensor, max), tensor)
        return by_two(smallest, found, self._operand(max))

    def _stacked(self, tensors: Sequence[torch.Tensor], dim: int = 0) -> np.ndarray:
        parts = [self._operand(tensor) for tensor in tensors]
        if dim != 0 or any(part.size != 1 for part in parts):
            raise Unknown
        return listed([part.item() for part in parts])

    def _operands(self, values: Sequence[Any], result: Any) -> list[np.ndarray]:
        """The numbers of the operands, if torch computes with them without rounding or overflow."""
        dtypes = {value.dtype for value in (*values, result) if isinstance(value, torch.Tensor)}
        rounds = any(isinstance(v, float) for v in values) or bool(dtypes & {*_FLOATS})
        most = min([_INTEGERS[dtype] for dtype in dtypes if dtype in _INTEGERS], default=EXACT)
        most = EXACT if rounds else most
        if not dtypes <= {*_FLOATS, *_INTEGERS, torch.bool}:
            raise Unknown
        found = [self._operand(value) for value in values]
        if not all(_below(one, most) for numbers in found for one in numbers.flat):
            raise Unknown
        return found

    def _operand(self, value: Any) -> np.ndarray:
        if not isinstance(value, torch.Tensor):
            return listed(value)
        found = self._numbers(value)
        if found is None:
            raise Unknown
        return found

    def _numbers(self, value: Any) -> np.ndarray | None:
        """The numbers of a tensor; None if they are not known."""
        if not isinstance(value, torch.Tensor):
            return None
        version = _version(value)
        if value in self._known:
            numbers, then = self._known[value]
            return numbers if version == then and version is not None else None
        if not _is_small(value):
            return None
        if type(value) is torch.Tensor:  # a constant of the model
            try:
                return None if self._wrote else read(value)
            except Unknown:
                return None
        names = [name for name, buffer in self._buffers.items() if buffer is value]
        return self._values[names[0]] if names and version == 0 else None

    def _kept(self, tensor: Any, numbers: np.ndarray) -> np.ndarray | None:
        """The numbers in a result's shape and dtype; None if it can't hold them exactly."""
        if not isinstance(tensor, torch.Tensor) or numbers.size > _MOST:
            return None
        sizes, dtype = tuple(tensor.shape), tensor.dtype
        if any(type(size) is not int for size in sizes) or math.prod(sizes) != numbers.size:
            return None
        if {isinstance(one, Number) for one in numbers.flat} != {dtype != torch.bool}:
            return None
        if dtype in _INTEGERS:
            numbers = by_one(cut, numbers)
        most = EXACT if dtype in _FLOATS else _INTEGERS.get(dtype, 0)
        if dtype != torch.bool and not all(_below(one, most) for one in numbers.flat):
            return None
        return numbers.reshape(sizes)


def _below(number: Any, most: int) -> bool:
    """True if a number's numerator is smaller at all declared sizes, as far as that is known.

    The sizes of all tensors are below 2**63, and so is what a model computes from them in int64,
    unless its bounds are known to be larger.
    """
    if not isinstance(number, Number):
        return True
    low, high = ends_of(number.top)
    if most == _INTEGERS[torch.int64]:
        return not any(math.isfinite(end) and abs(end) >= most for end in (low, high))
    return max(abs(low), abs(high)) < most


def _version(tensor: torch.Tensor) -> int | None:
    """The number of writes into a tensor; None if torch does not count them (inference mode)."""
    try:
        return tensor._version
    except RuntimeError:
        return None


def _is_torchs(function: object) -> bool:
    """True for a function of torch's own API, and not one of its name."""
    if isinstance(function, FunctionType):
        return function.__module__.split(".")[0] == "torch"
    return isinstance(
        function,
        BuiltinFunctionType | MethodDescriptorType | WrapperDescriptorType | MethodWrapperType,
    )


def _may_write(function: object, name: str, kwargs: Mapping[str, Any]) -> bool:
    if isinstance(function, torch._ops.OpOverload):
        return function._schema.is_mutable
    return name not in _PURE or "out" in kwargs


def _has_small(value: Any) -> bool:
    """True for a small tensor of integers, and for a list that has one."""
    if isinstance(value, (tuple, list)):
        return any(map(_has_small, value))
    return isinstance(value, torch.Tensor) and _is_small(value)


def _names_dtype(values: Iterable[Any]) -> bool:
    return any(isinstance(value, torch.dtype) for value in values)


def _has_sizes(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_sizes, value))
    return isinstance(value, torch.SymInt)


def _is_small(tensor: torch.Tensor) -> bool:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.is_sparse:
        return False
    shape = tensor.shape
    return all(type(size) is int for size in shape) and math.prod(shape) <= _MOST


def _plain(value: Any, dtype: torch.dtype) -> Any:
    """A number as Python's or torch's own, of a tensor's dtype; None if it has no exact form."""
    if not isinstance(value, Number):
        return value
    if not dtype.is_floating_point:
        return value.top
    if not value.exact:
        return None
    made: Any = torch.sym_float
    whole = made(value.top)
    return whole if value.bottom == 1 else whole / value.bottom
