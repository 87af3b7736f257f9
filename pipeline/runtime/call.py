"""A call of an engine, with numpy arrays or with arrays on the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.errors import InputError
from pipeline.runtime import cuda as _cuda
from pipeline.runtime.array_interface import plain
from pipeline.runtime.arrays import device_view, dtype_error, host_array, stream_handle
from pipeline.runtime.device_array import DeviceArray
from pipeline.runtime.pool import QUIET
from pipeline.runtime.sizes import Shape
from pipeline.runtime.state import EngineState
from pipeline.runtime.timing import Timer


def call(
    runs: EngineState, given: Mapping[str, Any], stream: Any, out: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Runs the engine; see `pipeline.runtime.engine.Engine`.

    Args:
        given: all inputs by name.
        stream, out: None if the caller passed none.

    Raises:
        InputError: an array, the stream or a size is invalid.
        EngineError: TensorRT or CUDA failed.
    """
    timing = runs.timing  # read once: another thread may switch it off
    timer = None if timing is None else timing.start()
    # the first input that TensorRT reads on the GPU decides; the others have to be on its side
    first = runs.first
    if first is not None and not isinstance(given[first], np.ndarray):
        if out is not None and not isinstance(out, Mapping):
            raise InputError("out: pass a dict of output name to array on the GPU")
        return call_device(runs, given, stream, out or {}, timer)
    for word, value in (("stream", stream), ("out", out)):
        if value is not None:
            raise InputError(
                f"{word}= needs inputs on the GPU, but numpy arrays were passed; leave it out, or "
                "copy them to the GPU"
            )
    return call_host(runs, given, timer)


def call_host(runs: EngineState, given: Mapping[str, Any], timer: Timer | None) -> dict[str, Any]:
    """Runs on numpy arrays, and returns when the outputs are computed."""
    shapes: list[Shape] = []
    places: list[Any] = []
    values: tuple[bytes, ...] = ()
    keep: list[Any] = []
    for port in runs.plan.inputs:
        array = host_array(port, given[port.name])
        shapes.append(array.shape)
        if port.on_host:
            places.append(array.ctypes.data)
            values += (array.tobytes(),)
            keep.append(array)
        else:
            places.append(array)
    own = runs.device.own
    with runs.lock:
        done, event = runs.run(shapes, values, places, own.handle, {}, timer)
    stream = own
    if runs.shared or not runs.last(event):
        stream = runs.device.copies  # so that the copies don't wait for other threads' runs
        event.wait(stream.handle)
    results = {}
    for port, shape, lease in done:
        result = np.empty(shape, port.dtype)
        if result.nbytes and lease is not None:
            _cuda.to_host(result, lease.pointer, result.nbytes, stream.handle)
        results[port.name] = result
    runs.shared = runs.shared or not runs.last(event)
    stream.synchronise()
    for port, _, lease in done:
        if lease is not None:
            lease.stream = QUIET
        if port.declared != port.dtype:
            results[port.name] = results[port.name].astype(port.declared)
    return results


def call_device(
    runs: EngineState,
    given: Mapping[str, Any],
    stream: Any,
    out: Mapping[str, Any],
    timer: Timer | None,
) -> dict[str, Any]:
    """Runs on arrays on the GPU, and returns when the run is enqueued."""
    device = runs.device
    own, index = device.own.handle, device.index
    handle = own if stream is None else (stream_handle(stream) or own)
    shapes: list[Shape] = []
    places: list[int] = []
    keep: list[Any] = []
    others: list[DeviceArray] = []
    values: tuple[bytes, ...] = ()
    for port in runs.plan.inputs:
        value = given[port.name]
        if port.on_host:
            array = host_array(port, value)
            shapes.append(array.shape)
            places.append(array.ctypes.data)
            values += (array.tobytes(),)
            keep.append(array)
        elif type(value) is DeviceArray and (place := value.at(device)) is not None:
            if value.dtype is not port.dtype and value.dtype != port.dtype:
                raise dtype_error(port, value.dtype)
            if value.enter(handle):
                others.append(value)
            shapes.append(value.shape)
            places.append(place)
        else:
            found = plain(port, value, runs.known, handle)
            if found is None:
                view = device_view(port, value, index, handle)
                shapes.append(view.shape)
                places.append(view.pointer)
                keep.append(view)
            else:
                shapes.append(found[1])
                places.append(found[0])
                keep.append(value)
    with runs.lock:
        device.turns.enter(handle, device)
        done, event = runs.run(shapes, values, places, handle, out, timer)
        device.turns.leave(handle, device, event)
        for other in others:
            other.used_until(event)
        if out:
            _written(out, handle, event)
        if handle == own and (keep or out):
            runs.held.hold(event, [*keep, *out.values()])
    outputs = {}
    for port, shape, lease in done:
        name = port.name
        outputs[name] = (
            out[name] if lease is None else DeviceArray(lease, shape, port.dtype, device, event)
        )
    return outputs


def _written(out: Mapping[str, Any], stream: int, event: _cuda.Event) -> None:
    for value in out.values():
        if type(value) is DeviceArray:
            value.written(stream, event)
