"""A model's inputs and outputs: one description from the spec to the engine.

Nothing here needs torch or onnx, so the runtime uses the same object as the export.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from pipeline.errors import InputError
from pipeline.spec.dims import Dim, DimExpr, Size, kept_rules, read_size, solve_sizes
from pipeline.spec.padding import Padding
from pipeline.spec.profiles import Profile
from pipeline.spec.tensors import End, Input, Output, Tolerance


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of a model, their legal sizes and their tolerances.

    Args:
        inputs: The inputs in the order of the ONNX file. Their shapes hold the dims.
        outputs: The outputs in the order of the ONNX file.
        rules: Rules on several sizes, such as ``past + seq <= 128``.
        padding: The padding round the model, which is part of the engine.
        profiles: Named ranges of the dims, in the engine's order.
        tolerance: The tolerance of each output that states none. None until it is measured.
        engine_tolerance: The tolerance of all outputs of an engine by precision. It replaces the
            other tolerances.
    """

    inputs: tuple[Input, ...] = ()
    outputs: tuple[Output, ...] = ()
    rules: tuple[str, ...] = ()
    padding: Padding | None = None
    profiles: tuple[Profile, ...] = ()
    tolerance: Tolerance | None = None
    engine_tolerance: Mapping[str, Tolerance] = field(default_factory=dict)

    @cached_property
    def dims(self) -> Mapping[str, Dim]:
        """The dims by name, in the order in which the inputs use them.

        Raises:
            InputError: Two different dims have the same name.
        """
        dims: dict[str, Dim] = {}
        for dim in (dim for input_ in self.inputs for dim in input_.dims):
            if dims.setdefault(dim.name, dim) != dim:
                raise InputError(f"two different dims are called {dim.name!r}; share the object")
        return dims

    @cached_property
    def input_shapes(self) -> Mapping[str, tuple[Size, ...]]:
        """The shape of each input by its name."""
        return {i.name: i.shape for i in self.inputs}

    @cached_property
    def output_shapes(self) -> Mapping[str, tuple[Size, ...]]:
        """The shape of each output that states one, by its name."""
        return {o.name: o.shape for o in self.outputs if o.shape is not None}

    @property
    def tensors(self) -> tuple[Input | Output, ...]:
        """The inputs, then the outputs."""
        return (*self.inputs, *self.outputs)

    def sizes_of(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """The dims' sizes in actual input shapes, each checked (see `solve_sizes`)."""
        return solve_sizes(self.input_shapes, shapes, self.rules, self.dims)

    def sizes_of_values(self) -> dict[str, int] | None:
        """The dims' sizes in the user's values. Dims that no value has are at their opt.

        Returns None if there are no values, or if these sizes are not legal.
        """
        given = {i.name: i.values.shape for i in self.inputs if i.values is not None}
        try:
            found = solve_sizes(
                {name: self.input_shapes[name] for name in given}, given, self.rules, self.dims
            )
        except InputError:  # the export may have narrowed the dims
            return None
        sizes = {**{name: dim.opt for name, dim in self.dims.items()}, **found}
        return sizes if given and kept_rules(self.rules, sizes) else None

    def sample(self, sizes: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
        """Inputs at these dim sizes by name: the user's values, or else random ones."""
        return {i.name: i.sample(sizes, seed) for i in self.inputs}

    def tolerances(self) -> dict[str, Tolerance]:
        """The tolerance of every output by its name.

        Raises:
            InputError: An output has none.
        """
        found: dict[str, Tolerance] = {}
        for output in self.outputs:
            tolerance = output.tolerance or self.tolerance
            if tolerance is None:
                raise InputError(f"output {output.name} has no tolerance")
            found[output.name] = tolerance
        return found

    def engine_tolerances(self, precision: str) -> dict[str, Tolerance]:
        """The tolerance of every output of an engine of that precision, by its name.

        Raises:
            InputError: An output has none.
        """
        own = self.engine_tolerance.get(precision)
        return {name: own or tolerance for name, tolerance in self.tolerances().items()}

    def with_tolerances(self, stated: Interface) -> Interface:
        """The same interface with the tolerances of another one.

        If `stated.tolerance` is None, the tolerances of the outputs stay unchanged.
        """
        new = replace(self, engine_tolerance=stated.engine_tolerance)
        if stated.tolerance is None:
            return new
        own = {o.name: o.tolerance for o in stated.outputs}
        outputs = tuple(replace(o, tolerance=own.get(o.name)) for o in self.outputs)
        return replace(new, tolerance=stated.tolerance, outputs=outputs)

    def settled(
        self, shapes: Mapping[str, Sequence[Size | str]], dtypes: Mapping[str, str]
    ) -> Interface:
        """The interface of the exported model, which an artifact stores.

        The pipeline does not narrow its dims any more. Every profile has a range for every dim,
        and every output has a shape and a dtype.

        Args:
            shapes: The shape of each output by its name, in terms of the dims.
            dtypes: The numpy dtype name of each output by its name.

        Raises:
            InputError: A profile does not fit the dims.
        """
        dims = {name: dim.settled() for name, dim in self.dims.items()}

        def read(shape: Sequence[Size | str]) -> tuple[Size, ...]:
            return tuple(read_size(size, dims) for size in shape)

        def end(value: End) -> End:
            return read_size(value, dims) if isinstance(value, (Dim, DimExpr)) else value

        return replace(
            self,
            inputs=tuple(
                replace(
                    i,
                    shape=read(i.shape),
                    dtype=np.dtype(i.dtype).name,
                    low=end(i.low),
                    high=end(i.high),
                )
                for i in self.inputs
            ),
            outputs=tuple(
                replace(o, shape=read(shapes[o.name]), dtype=dtypes[o.name]) for o in self.outputs
            ),
            profiles=tuple(profile.resolve(dims) for profile in self.profiles),
        )
