"""A call of an engine, with numpy arrays or with arrays on the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline import _cuda
from pipeline._arrays import device_view, dtype_error, host_array, stream_handle
from pipeline._device_array import DeviceArray
from pipeline._engine_pool import QUIET
from pipeline._engine_run import Runs
from pipeline._engine_sizes import Shape
from pipeline.errors import InputError


def call(
    runs: Runs, given: Mapping[str, Any], stream: Any, out: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Runs the engine; see `pipeline.runtime.Engine`.

    Args:
        given: all inputs by name.
        stream, out: None where the caller gave none.

    Raises:
        InputError: arrays, a stream or sizes that can't be; one line.
        EngineError: TensorRT or CUDA failed.
    """
    # of the inputs on the GPU the first decides; the others have to be of its kind
    first = next((port.name for port in runs.plan.inputs if not port.on_host), None)
    if first is not None and not isinstance(given[first], np.ndarray):
        if out is not None and not isinstance(out, Mapping):
            raise InputError("out: give a dict of output name to array on the GPU")
        return call_device(runs, given, stream, out or {})
    for word, value in (("stream", stream), ("out", out)):
        if value is not None:
            raise InputError(
                f"{word}= needs inputs on the GPU, but numpy arrays were given; leave it out, or "
                "copy them to the GPU"
            )
    return dict(call_host(runs, given))


def call_host(runs: Runs, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Numpy arrays in and out; returns when they are there."""
    arrays = [host_array(port, given[port.name]) for port in runs.plan.inputs]
    places = [
        array.ctypes.data if port.on_host else array
        for port, array in zip(runs.plan.inputs, arrays, strict=True)
    ]
    values = tuple(
        array.tobytes()
        for port, array in zip(runs.plan.inputs, arrays, strict=True)
        if port.on_host
    )
    copies = runs.device.copies
    with runs.lock:
        own = runs.device.own.handle
        done, event = runs.run([a.shape for a in arrays], values, places, own, {})
    event.wait(copies.handle)
    results = {}
    for item in done:
        result = np.empty(item.shape, item.port.dtype)
        if result.nbytes and item.lease is not None:
            _cuda.to_host(result.ctypes.data, item.lease.pointer, result.nbytes, copies.handle)
        results[item.port.name] = result
    copies.synchronise()
    for item in done:
        if item.lease is not None:
            item.lease.stream = QUIET
    return {
        item.port.name: results[item.port.name].astype(item.port.declared, copy=False)
        for item in done
    }


def call_device(
    runs: Runs, given: Mapping[str, Any], stream: Any, out: Mapping[str, Any]
) -> dict[str, Any]:
    """Arrays on the GPU in and out; returns when it is enqueued."""
    own, index = runs.device.own.handle, runs.device.index
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
        elif type(value) is DeviceArray and value.device == index:
            if value.dtype != port.dtype:
                raise dtype_error(port, value.dtype)
            if value.enter(handle):
                others.append(value)
            shapes.append(value.shape)
            places.append(value.ptr)
        else:
            view = device_view(port, value, index, handle)
            shapes.append(view.shape)
            places.append(view.pointer)
            keep.append(view)
    with runs.lock:
        done, event = runs.run(shapes, values, places, handle, out)
        for other in others:
            other.used_until(event)
        for value in out.values():
            if type(value) is DeviceArray:
                value.written(handle, event)
        if handle == own and (keep or out):
            runs.hold(event, [*keep, *out.values()])
    return {
        item.port.name: (
            out[item.port.name]
            if item.lease is None
            else DeviceArray(item.lease, item.shape, item.port.dtype, runs.device, event)
        )
        for item in done
    }
