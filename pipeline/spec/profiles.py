"""Optimisation profiles made from dims, and the sizes at which a conversion is verified."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pipeline.errors import InputError
from pipeline.spec.dims import Dim, Size, SizeRule, check_rules, kept_rules, shape_at, sizes_text
from pipeline.spec.file_names import RESERVED
from pipeline.spec.given import named_fields

Range = tuple[int, int, int]
_FEW = ("min", "opt", "odd, above opt", "max")
_NAME = re.compile(r"\w[\w-]*")


@named_fields
@dataclass(frozen=True)
class Profile:
    """min, opt and max of every dim. TensorRT builds one set of kernels for each profile.

    Args:
        name: The profile's name.
        ranges: (min, opt, max) by dim name. Dims that are left out have their whole range.
    """

    name: str
    ranges: Mapping[str, Range] = field(default_factory=dict)

    @staticmethod
    def parse(text: str, name: str) -> Profile:
        """Reads ``h=135:440:2160,w=512`` (one number fixes a dim).

        Raises:
            InputError: The text does not have that form.
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
            InputError: A dim is unknown, or does not allow its range.
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

    def check_shapes(self, inputs: Mapping[str, Sequence[Size]]) -> None:
        """Checks that each input's size grows from min over opt to max.

        This always holds for dims, but not for an expression such as ``64 - h``.

        Raises:
            InputError: A size does not grow.
        """
        for name, (low, opt, high) in self.shapes(inputs).items():
            for axis, (a, b, c) in enumerate(zip(low, opt, high, strict=True)):
                if not 0 <= a <= b <= c:
                    raise InputError(
                        f"profile {self.name}: {name} axis {axis} is {inputs[name][axis]}: {a}, "
                        f"{b}, {c} at min, opt, max; an input's size must grow with its dims"
                    )

    def allows(self, sizes: Mapping[str, int]) -> bool:
        """True if every dim's size is within this profile."""
        return all(low <= sizes[name] <= high for name, (low, _, high) in self.ranges.items())


@dataclass(frozen=True)
class Point:
    """One set of sizes to verify at, and why it was chosen."""

    label: str
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.label} ({sizes_text(self.sizes)})"


def check_names(profiles: Sequence[Profile]) -> None:
    """Checks the names of profiles, which become folders and parts of engines' names.

    Raises:
        InputError: A name is not valid for a folder, or two profiles have the same name.
    """
    names = [profile.name for profile in profiles]
    if len(set(names)) != len(names):
        raise InputError(f"two profiles have the same name: {', '.join(names)}. Rename one")
    for name in names:
        if not _NAME.fullmatch(name) or name in RESERVED:
            raise InputError(
                f"profile name {name!r} is not valid for a folder. Use letters, digits, _ and -, "
                f"but none of {', '.join(RESERVED)}"
            )


def parse_sizes(
    text: str, dims: Mapping[str, Dim], merged: Mapping[str, str] = MappingProxyType({})
) -> dict[str, int]:
    """Reads ``h=441,w=1023`` into legal sizes; dims that are left out have their opt.

    Args:
        text: The sizes by dim.
        dims: The dims by name.
        merged: Other names of dims (see `pipeline.spec.rules.merged_dims`).

    Raises:
        InputError: The text does not have that form, a dim is unknown, or a size is not legal.
            Or a dim has two sizes by two names.
    """
    sizes = {name: dim.opt for name, dim in dims.items()}
    given: dict[str, str] = {}
    for part in text.split(","):
        own, _, value = part.partition("=")
        key = merged.get(own, own)
        if given.setdefault(key, value) != value and merged:
            raise InputError(f"shape {text!r}: {own} must equal the other names of {key}")
        if key not in dims:
            known = ", ".join(dims) or "none"
            raise InputError(f"shape {text!r}: no dim {key!r}; the model's dims: {known}")
        if not value.isascii() or not value.isdigit():
            raise InputError(f"shape {text!r}: {part!r} is not DIM=SIZE")
        dims[key].check(int(value), f"shape {text!r}")
        sizes[key] = int(value)
    return sizes


def points(
    dims: Mapping[str, Dim],
    profiles: Sequence[Profile],
    extra: Sequence[Mapping[str, int]] = (),
    rules: Sequence[str] = (),
    *,
    few: bool = False,
) -> tuple[Point, ...]:
    """The sizes at which to verify a model: min, opt and max of each profile, and others.

    One more set of sizes is below opt, and one is above it; both are odd if that is legal. The
    first dim is halfway below opt, and a quarter of the way above it, on a logarithmic scale. The
    other dims are nearer to the start, so that dims of the same range differ.

    Mixed corners (one dim at its min, the others at their max, and the reverse) show swapped axes.
    Sizes that break a rule are changed: each dim of the rule once keeps its size, and the others
    move. A set of sizes is listed once.

    Args:
        dims: The model's dims by name.
        profiles: The profiles, each with a range for every dim.
        extra: More sets of sizes.
        rules: The rules that sizes have to keep, as text.
        few: Leave out all but min, opt, max and one odd set of sizes of each profile.
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
                start, end = max(a[name], 1), max(b[name], 1)
                size = dim.legal(round(start ** (1 - part) * end**part), odd=True)
                lowest, _, highest = profile.ranges[name]  # noqa: B023
                sizes[name] = size if lowest <= size <= highest else a[name]
            return sizes

        wanted: dict[str, Mapping[str, int]]
        wanted = {"min": low, "odd, below opt": between(low, opt, 0.5), "opt": opt}
        if len(dims) > 1:
            first = next(iter(dims))
            for name in dims if len(dims) > 2 else [first]:
                wanted[f"{name} min, rest max"] = {**high, name: low[name]}
            wanted[f"{first} max, rest min"] = {**low, first: high[first]}
        wanted |= {"odd, above opt": between(opt, high, 0.25), "max": high}
        # torch.export assumes, without a guard, that dynamic sizes are not 1
        for name, dim in dims.items():
            if low[name] < 1 <= high[name] and dim.legal(1) == 1:
                wanted[f"{name} 1"] = {**opt, name: 1}
        if few:
            wanted = {label: wanted[label] for label in _FEW}
        for label, sizes in wanted.items():
            for more, kept in near_rules(sizes, dims, profile, rules):
                add(f"{tag}{label}{more}", kept)
    for sizes in extra:
        add("asked for", sizes)
    return tuple(found)


def near_rules(
    sizes: Mapping[str, int], dims: Mapping[str, Dim], profile: Profile, rules: Sequence[str]
) -> list[tuple[str, dict[str, int]]]:
    """The sizes, or sets of sizes near them that keep the rules.

    A rule on one dim moves that dim to its nearest legal size. A rule on several dims gives one set
    of sizes for each dim: this dim keeps its size, and the others are as large as the rules allow.

    Returns:
        For each set of sizes, an addition to its label, and the sizes.
    """
    if kept_rules(rules, sizes):
        return [("", dict(sizes))]
    parsed = [SizeRule(text) for text in rules]
    moved = dict(sizes)
    for name, dim in dims.items():
        own = [str(rule) for rule in parsed if rule.names == {name}]
        low, _, high = profile.ranges[name]
        kept = [n for n in range(low, high + 1, dim.multiple_of) if kept_rules(own, {name: n})]
        moved[name] = min(kept, key=lambda n: abs(n - sizes[name]), default=sizes[name])
    sizes = moved
    if kept_rules(rules, sizes):
        return [("", moved)]
    names = {n for rule in parsed if not rule.kept(sizes) for n in rule.names}
    found = []
    for keep in (name for name in dims if name in names):
        near = {**sizes, **{n: profile.ranges[n][0] for n in names if n != keep}}
        for name in (n for n in dims if n in names and n != keep):
            low, _, high = profile.ranges[name]
            legal = range(low, high + 1, dims[name].multiple_of)
            good = [n for n in legal if n <= sizes[name] and kept_rules(rules, {**near, name: n})]
            near[name] = max(good, default=low)
        if kept_rules(rules, near):
            found.append((f", {keep} kept", near))
    return found


def sizes_to_time(
    dims: Mapping[str, Dim],
    profiles: Sequence[Profile],
    rules: Sequence[str],
    shapes: Sequence[str] = (),
) -> tuple[Point, ...]:
    """The sizes in `shapes`; if it is empty, min, opt and max of every profile.

    Raises:
        InputError: A shape does not have the form ``h=440,w=1024``, or is not legal.
    """
    if shapes:
        found = []
        for text in shapes:
            sizes = parse_sizes(text, dims)
            check_rules(rules, sizes)
            if not any(profile.allows(sizes) for profile in profiles):
                known = "; ".join(f"{p.name}: {_ranges(p)}" for p in profiles)
                raise InputError(f"shape {text!r}: no profile allows it ({known})")
            found.append(Point("asked for", sizes))
        return tuple({tuple(p.sizes.items()): p for p in found}.values())
    every: dict[tuple[int, ...], Point] = {}
    for profile in profiles:
        tag = f"{profile.name}: " if len(profiles) > 1 else ""
        for which, label in enumerate(("min", "opt", "max")):
            for more, sizes in near_rules(profile.sizes(which), dims, profile, rules):
                every.setdefault(tuple(sizes.values()), Point(f"{tag}{label}{more}", sizes))
    return tuple(every.values())


def _ranges(profile: Profile) -> str:
    return ",".join(f"{name}={low}..{high}" for name, (low, _, high) in profile.ranges.items())
