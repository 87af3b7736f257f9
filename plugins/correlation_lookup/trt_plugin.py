"""CorrelationLookup as a TensorRT plugin in Python: IPluginV3 (TensorRT 10 and later, RTX)."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.plugins.correlation_lookup.cuda import KernelSizes, launch
from pipeline.plugins.correlation_lookup.function import LEVELS, NAME

VERSION = "1"
_COORDINATES = LEVELS + 1  # its place among the inputs; features and levels come before


def register(trt: Any) -> None:
    """Registers the creator with a TensorRT module's registry. A second call changes nothing."""
    registry = trt.get_plugin_registry()
    if registry.get_creator(NAME, VERSION, "") is None:
        creator = _creator(trt)
        registry.register_creator(creator, "")
        _kept.append(creator)


_kept: list[Any] = []  # the registry does not keep a Python creator alive


def _creator(trt: Any) -> Any:
    """The creator. Its class derives from the TensorRT module, which is known only at run time."""
    plugin = _plugin_class(trt)

    class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = NAME, VERSION, ""
            self.field_names = trt.PluginFieldCollection(
                [trt.PluginField("radius", np.array([], np.int32), trt.PluginFieldType.INT32)]
            )

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            del name, phase
            values = {field.name: field.data for field in fields}
            if "radius" not in values:
                raise ValueError(f"{NAME}: the node has no attribute radius")
            return plugin(int(np.asarray(values["radius"]).reshape(-1)[0]))

    return Creator()


def _plugin_class(trt: Any) -> Any:
    bases = (
        trt.IPluginV3,
        trt.IPluginV3OneCore,
        trt.IPluginV3OneBuild,
        trt.IPluginV3OneRuntime,
    )

    class CorrelationLookup(*bases):  # type: ignore[misc]
        """All tensors are linear. Features, levels and windows are all float32 or all float16."""

        def __init__(self, radius: int) -> None:
            for base in bases:
                base.__init__(self)
            self.radius = radius
            self.plugin_name, self.plugin_version, self.plugin_namespace = NAME, VERSION, ""
            self.num_outputs = 1

        def get_capability_interface(self, kind: Any) -> Any:
            del kind
            return self

        def clone(self) -> Any:
            return CorrelationLookup(self.radius)

        def get_fields_to_serialize(self) -> Any:
            data = np.array([self.radius], np.int32)
            return trt.PluginFieldCollection(
                [trt.PluginField("radius", data, trt.PluginFieldType.INT32)]
            )

        def get_output_data_types(self, types: Any) -> Any:
            return [types[0]]

        def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: Any) -> Any:
            del shape_inputs
            batch, height, width, _ = inputs[0]
            points = builder.constant(LEVELS * (2 * self.radius + 1) ** 2)
            return [trt.DimsExprs([batch, points, height, width])]

        def supports_format_combination(self, place: int, tensors: Any, inputs: int) -> bool:
            del inputs
            tensor = tensors[place].desc
            if tensor.format != trt.TensorFormat.LINEAR:
                return False
            if place == _COORDINATES:
                return bool(tensor.type == trt.float32)
            if place == 0:
                return tensor.type in (trt.float32, trt.float16)
            return bool(tensor.type == tensors[0].desc.type)

        def configure_plugin(self, inputs: Any, outputs: Any) -> None:
            del outputs
            if len(inputs) != LEVELS + 2:
                raise ValueError(
                    f"{NAME}: the node has {len(inputs)} inputs, but needs {LEVELS + 2}"
                )

        def get_workspace_size(self, inputs: Any, outputs: Any) -> int:
            del inputs, outputs
            return 0

        def get_valid_tactics(self) -> list[int]:
            return []

        def set_tactic(self, tactic: int) -> None:
            del tactic

        def on_shape_change(self, inputs: Any, outputs: Any) -> None:
            del inputs, outputs

        def attach_to_context(self, context: Any) -> Any:
            del context
            return self.clone()

        def enqueue(
            self,
            input_desc: Any,
            output_desc: Any,
            inputs: Any,
            outputs: Any,
            workspace: int,
            stream: int,
        ) -> None:

            del output_desc, workspace
            levels = tuple((d.dims[1], d.dims[2]) for d in input_desc[1:_COORDINATES])
            batch, height, width, channels = input_desc[0].dims
            sizes = KernelSizes(batch, height, width, channels, levels)
            half = input_desc[0].type == trt.float16
            launch(self.radius, half, sizes, (*inputs, *outputs), stream)

    return CorrelationLookup
