"""An engine's outputs on the GPU."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np

from pipeline.runtime import cuda as _cuda
from pipeline.runtime.arrays import cuda_views
from pipeline.runtime.pool import ALIGN, DIRTY, Lease


class DeviceArray:
    """An engine's output in GPU memory, C-contiguous.

    Its memory is not used again while the array, or an array made from it by DLPack, is alive. It
    stays valid after the engine is closed.

    Work on the stream that computed the array sees its values. On another stream, use DLPack
    (``torch.from_dlpack``, ``cupy.from_dlpack``): it makes that stream wait. Keep that stream as
    long as you use the array. If you use ``__cuda_array_interface__``, wait for the stream that it
    names (version 3), and keep the array until your work is done. If the call had no ``stream=``,
    the legacy default stream (torch's default) always sees the values.
    """

    __slots__ = ("_device", "_event", "_lease", "_stream", "dtype", "shape")

    def __init__(
        self,
        lease: Lease,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        device: _cuda.Device,
        event: _cuda.Event,
    ) -> None:
        self._lease, self.shape, self.dtype = lease, shape, dtype
        self._device, self._event, self._stream = device, event, lease.stream

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, GPU {self._device.index})"

    @property
    def ptr(self) -> int:
        """The address; the class says when you can read it."""
        return self._lease.pointer

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def device(self) -> int:
        """CUDA's number of the GPU."""
        return self._device.index

    def numpy(self) -> np.ndarray:
        """Waits for the values and returns a copy on the host.

        Raises:
            EngineError: the GPU failed.
        """
        result = np.empty(self.shape, self.dtype)
        with self._device.current():
            stream = self._device.copies
            self._event.wait(stream.handle)
            if result.nbytes:
                _cuda.to_host(result, self.ptr, result.nbytes, stream.handle)
            stream.synchronise()
        return result

    def enter(self, stream: int) -> bool:
        """Makes an engine's stream wait; True if you have to call `used_until` afterwards."""
        if stream != self._stream:
            self._event.wait(stream)
        return stream != self._lease.stream

    def at(self, device: _cuda.Device) -> int | None:
        """The address if the array is on this GPU, else None."""
        mine = self._device
        return self._lease.pointer if mine is device or mine.index == device.index else None

    def used_until(self, event: _cuda.Event) -> None:
        """Records that an engine on another stream uses the array until the event.

        Each run of an engine waits for the run before, so its last event is enough.
        """
        after = self._lease.after
        for old in [moment for moment in after if isinstance(moment, _cuda.Event)]:
            if old.home is event.home:
                with suppress(ValueError):  # another thread removed it
                    after.remove(old)
        after.append(event)

    def written(self, stream: int, event: _cuda.Event) -> None:
        """Records that an engine writes new values into the array (``out=``) until the event."""
        self._event, self._stream = event, stream
        if stream != self._lease.stream:
            self.used_until(event)

    def ready_for(self, stream: int) -> None:
        """Makes a stream wait until the array is computed, and records that it uses the array.

        Args:
            stream: the consumer's stream. With -1 the consumer wants no wait, and does not say
                which stream it uses.
        """
        own, home = self._device.own.handle, self._lease.stream
        if stream == -1:
            self._lease.stream = DIRTY
            return
        # `own` and the legacy default stream are ordered anyway, see `pipeline.runtime.cuda.Stream`
        if not (self._stream == own and stream in (own, _cuda.LEGACY)):
            with self._device.current():
                self._event.wait(stream)
        if stream == home or (home == own and stream == _cuda.LEGACY):
            return
        after = self._lease.after
        if stream == _cuda.PER_THREAD:  # a different stream in every thread
            self._lease.stream = DIRTY
        elif not any(isinstance(old, _cuda.Reader) and old.stream == stream for old in after):
            after.append(_cuda.Reader(stream, self._device.events))

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self._device.index)  # kDLCUDA

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule; the consumer's stream (None: the legacy default) waits for the data.

        Raises:
            BufferError: a copy or another device was asked for.
        """
        from cuda.core import Buffer

        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError("the array stays on its GPU; .numpy() copies it to the host")
        if copy:
            raise BufferError("copy=True is not supported; copy the array that you get")
        self.ready_for(stream or _cuda.LEGACY)
        self._device.activate()
        with self._device.current():
            buffer = Buffer.from_handle(self.ptr, max(self.nbytes, ALIGN), owner=self._lease)
            view = cuda_views().from_buffer(buffer, self.shape, dtype=self.dtype)
            return view.__dlpack__(max_version=max_version)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        own = self._device.own.handle
        if self._stream != own:
            with self._device.current():
                self._event.wait(own)
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.ptr if self.nbytes else 0, False),
            "strides": None,
            "stream": own,
        }
