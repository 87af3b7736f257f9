"""Optimisation profiles made from dims, and the sizes at which a conversion is verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.dims import Dim, Size, shape_at
from pipeline.errors import InputError

Range = tuple[int, int, int]


@dataclass(frozen=True)
class Profile:
    """min, opt and max of every dim, for which TensorRT builds one set of kernels.

    Dims that are left out take their own range.
    """

    name: str
    ranges: Mapping[str, Range] = field(default_factory=dict)

    @staticmethod
    def parse(text: str, name: str) -> Profile:
        """Reads ``h=135:440:2160,w=512`` (one number fixes a dim).

        Raises:
            InputError: the text is not of that form.
        """
        ranges: dict[str, Range] = {}
        for part in text.split(","):
            key, equals, value = (text.strip() for text in part.partition("="))
            try:
                numbers = [int(number) for number in value.split(":")]
            except ValueError:
                numbers = []
            if not equals or not key or len(numbers) not in (1, 3):
                raise InputError(f"profile {text!r}: {part!r} is not DIM=MIN:OPT:MAX or DIM=SIZE")
            if key in ranges:
                raise InputError(f"profile {text!r}: {key} is given twice")
            low, opt, high = numbers if len(numbers) == 3 else numbers * 3
            ranges[key] = (low, opt, high)
        return Profile(name, ranges)

    def resolve(self, dims: Mapping[str, Dim]) -> Profile:
        """The profile with a range for every dim, each checked against its dim.

        Raises:
            InputError: an unknown dim, or a range that its dim does not allow.
        """
        for name in self.ranges.keys() - dims.keys():
            known = ", ".join(dims) or "none"
            raise InputError(f"profile {self.name}: no dim {name!r}; the model's dims: {known}")
        ranges: dict[str, Range] = {}
        for name, dim in dims.items():
            low, opt, high = self.ranges.get(name, (dim.min, dim.opt, dim.max))
            if low > high:
                raise InputError(f"profile {self.name}: {name}: min={low} is greater than {high}")
            if not low <= opt <= high:
                raise InputError(f"profile {self.name}: {name}: opt={opt} is outside {low}..{high}")
            for size in (low, opt, high):
                dim.check(size, f"profile {self.name}")
            ranges[name] = (low, opt, high)
        return Profile(self.name, ranges)

    def sizes(self, which: int) -> dict[str, int]:
        """The dims' sizes at min (0), opt (1) or max (2)."""
        return {name: range_[which] for name, range_ in self.ranges.items()}

    def shapes(
        self, inputs: Mapping[str, Sequence[Size]]
    ) -> dict[str, tuple[tuple[int, ...], ...]]:
        """min, opt and max shape by input name."""
        return {
            name: tuple(shape_at(shape, self.sizes(which)) for which in range(3))
            for name, shape in inputs.items()
        }

    def allows(self, sizes: Mapping[str, int]) -> bool:
        """True if every dim's size is within this profile."""
        return all(low <= sizes[name] <= high for name, (low, _, high) in self.ranges.items())


@dataclass(frozen=True)
class Point:
    """One set of sizes to verify at, and why it was chosen."""

    label: str
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.label} ({','.join(f'{k}={v}' for k, v in self.sizes.items())})"


def parse_sizes(text: str, dims: Mapping[str, Dim]) -> dict[str, int]:
    """Reads ``h=441,w=1023`` into legal sizes; dims left out take their opt.

    Raises:
        InputError: not of that form, an unknown dim, or an illegal size.
    """
    sizes = {name: dim.opt for name, dim in dims.items()}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key not in dims:
            known = ", ".join(dims) or "none"
            raise InputError(f"shape {text!r}: no dim {key!r}; the model's dims: {known}")
        if not value.isascii() or not value.isdigit():
            raise InputError(f"shape {text!r}: {part!r} is not DIM=SIZE")
        dims[key].check(int(value), f"shape {text!r}")
        sizes[key] = int(value)
    return sizes


def points(
    dims: Mapping[str, Dim], profiles: Sequence[Profile], extra: Sequence[Mapping[str, int]] = ()
) -> tuple[Point, ...]:
    """The sizes at which to verify a model: of each profile min, opt, max, between them, odd.

    Sizes between lie halfway (below opt) and a quarter of the way (above it, where sizes get
    dear) in the logarithm for the first dim and less far for the others, so that dims of the
    same range differ, and are odd where an odd size is legal. The mixed corners (one dim at its
    min, the others at their max, and the other way round) tell swapped axes apart. A set of
    sizes is listed once.
    """
    found: list[Point] = []

    def add(label: str, sizes: Mapping[str, int]) -> None:
        if all(point.sizes != sizes for point in found):
            found.append(Point(label, dict(sizes)))

    for profile in profiles:
        tag = f"{profile.name}: " if len(profiles) > 1 else ""
        low, opt, high = (profile.sizes(which) for which in range(3))

        def between(a: Mapping[str, int], b: Mapping[str, int], part: float) -> dict[str, int]:
            sizes = {}
            for place, (name, dim) in enumerate(dims.items()):
                part *= 1 if place == 0 else 0.75  # dims of the same range get different sizes
                size = dim.legal(round(a[name] ** (1 - part) * b[name] ** part), odd=True)
                lowest, _, highest = profile.ranges[name]  # noqa: B023
                sizes[name] = size if lowest <= size <= highest else a[name]
            return sizes

        add(f"{tag}min", low)
        add(f"{tag}odd, below opt", between(low, opt, 0.5))
        add(f"{tag}opt", opt)
        if len(dims) > 1:
            first = next(iter(dims))
            for name in dims if len(dims) > 2 else [first]:
                add(f"{tag}{name} min, rest max", {**high, name: low[name]})
            add(f"{tag}{first} max, rest min", {**low, first: high[first]})
        add(f"{tag}odd, above opt", between(opt, high, 0.25))
        add(f"{tag}max", high)
    for sizes in extra:
        add("asked for", sizes)
    return tuple(found)
