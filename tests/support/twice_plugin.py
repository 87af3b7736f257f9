"""``Twice``, a minimal plugin for the tests.

It is a Python IPluginV3 that can be parsed and built, but computes nothing.
"""

from __future__ import annotations

from typing import Any


def register(trt: Any) -> None:
    class Twice(
        trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime
    ):  # type: ignore[misc]
        def __init__(self) -> None:
            for base in Twice.__bases__:
                base.__init__(self)
            self.plugin_name, self.plugin_version, self.plugin_namespace = "Twice", "1", ""
            self.num_outputs = 1

        def get_capability_interface(self, _: Any) -> Any:
            return self

        def get_output_data_types(self, types: Any) -> Any:
            return [types[0]]

        def get_output_shapes(self, inputs: Any, *_: Any) -> Any:
            return [trt.DimsExprs(inputs[0])]

        def get_fields_to_serialize(self) -> Any:
            return trt.PluginFieldCollection([])

        def configure_plugin(self, *_: Any) -> None:
            pass

        def supports_format_combination(self, place: int, tensors: Any, _: int) -> bool:
            return bool(tensors[place].desc.format == trt.TensorFormat.LINEAR)

        def clone(self) -> Any:
            made = Twice()
            made.__dict__.update(self.__dict__)
            return made

    class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = "Twice", "1", ""
            self.field_names = trt.PluginFieldCollection([])

        def create_plugin(self, *_: Any) -> Any:
            return Twice()

    assert trt.get_plugin_registry().register_creator(Creator(), "")
