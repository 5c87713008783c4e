"""One runtime and one device of it, with what the scheduler needs to know about them in one place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from hicache_sched.device.cuda_thread import leave_global_capture_mode
from hicache_sched.device.emulated import EmulatedDevice
from hicache_sched.device.runtime import Event, Runtime, Stream


class InMemory(NamedTuple):
    """A one-dimensional tensor of int64, as it lies in memory.

    Attributes:
        address: of its first value.
        stride: in values.
        on_device: whether that is memory of the device.
        held: as `DeviceBinding.holds` has it.
        storage: keeps the memory, whatever becomes of the tensor.
    """

    address: int
    stride: int
    on_device: bool
    held: bool
    storage: torch.UntypedStorage


class DeviceBinding:
    """A runtime bound to the device that was current where it was made.

    Streams, events and current streams are taken for that device explicitly, whichever device is current on the
    calling thread.

    Attributes:
        runtime: the device API in use.
        index: which of the runtime's devices.
        is_cuda: whether the runtime is `torch.cuda` on CUDA, and not on ROCm.
    """

    def __init__(self, runtime: Any) -> None:
        self.runtime: Runtime = runtime
        self.index: int = runtime.current_device()
        self.is_cuda = runtime is torch.cuda and torch.version.cuda is not None
        self._has_all_tensors = not isinstance(runtime, ModuleType)
        # Runtimes without stream capture lack the question as well.
        self._is_capturing = getattr(runtime, "is_current_stream_capturing", None)

    @property
    def name(self) -> str:
        """The device as logs name it."""
        if isinstance(self.runtime, EmulatedDevice):
            return "emulated"
        runtime_name = getattr(self.runtime, "__name__", type(self.runtime).__name__)
        return f"{runtime_name.removeprefix('torch.')}:{self.index}"

    def new_stream(self) -> Stream:
        stream: Stream = self.runtime.Stream(device=self.index)
        return stream

    def new_event(self, *, timed: bool = False) -> Event:
        """An event that is safe to block on: without `blocking=True` a wait on the host spins (CUDA runtime
        API, `cudaEventBlockingSync`)."""
        event: Event = self.runtime.Event(enable_timing=timed, blocking=True)
        return event

    def handle_of(self, event: Event, stream: Stream) -> int:
        """By which a native data plane knows an event, for as long as the event is there.

        :param stream: where it can be recorded: torch makes an event when that is done for the first time.
        """
        if isinstance(self.runtime, EmulatedDevice):
            return self.runtime.handle_of(event)
        if not self.is_cuda:
            raise NotImplementedError
        cuda_event: Any = event
        if not cuda_event.cuda_event:
            cuda_event.record(stream)
        handle: int = cuda_event.cuda_event
        return handle

    def current_stream(self) -> Stream:
        stream: Stream = self.runtime.current_stream(self.index)
        return stream

    def use_stream(self, stream: Stream) -> AbstractContextManager[Any]:
        return self.runtime.stream(stream)

    def is_capturing(self) -> bool:
        """Whether the calling thread's current stream is being captured into a graph."""
        return self._is_capturing is not None and bool(self._is_capturing())

    def bind_thread(self) -> None:
        """Make this device the calling thread's, once in the life of a thread of ours.

        On CUDA the thread also leaves the global capture mode, so that it cannot break an engine's capture.
        """
        self.runtime.set_device(self.index)
        if self.is_cuda:
            leave_global_capture_mode(self.index)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether reading `tensor` on the host has to wait for the device.

        Only a device module of torch can be told by the tensor: emulated device memory is CPU memory, so with any
        other runtime every tensor counts as the device's.
        """
        return self._has_all_tensors or not tensor.is_cpu

    def find(self, tensor: torch.Tensor) -> InMemory | None:
        """Where a native data plane can read `tensor`, one-dimensional int64 and not empty, by its address: in CPU
        memory as it is, in memory of this device in order of a stream. None for a tensor that is not plainly there; one
        of a class of its own may be anything."""
        if type(tensor) is not torch.Tensor or tensor.is_neg():
            return None
        try:
            storage, address, stride = tensor.untyped_storage(), tensor.data_ptr(), tensor.stride(0)
            # Not within it where the memory was given back, or there never was any.
            end = address + ((tensor.shape[0] - 1) * stride + 1) * 8
            if not address or end > storage.data_ptr() + storage.nbytes():
                return None
        except RuntimeError:  # a tensor inside one of torch's transforms
            return None
        in_cpu = tensor.is_cpu
        if not in_cpu and not (self.is_cuda and tensor.is_cuda and tensor.device.index == self.index):
            return None
        return InMemory(address, stride, not in_cpu, self._has_all_tensors or not in_cpu, storage)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Values of `tensors` in CPU memory, read in order of the current stream; blocks until they are there.

        What is in CPU memory already is simply passed through, except on an emulated device, whose memory that is.
        """
        if isinstance(self.runtime, EmulatedDevice):
            return self.runtime.read(tensors)
        return [tensor.cpu() for tensor in tensors]


def runs_inline(stream: Stream) -> bool:
    """Whether being ordered behind an event means, on this stream, blocking the calling thread."""
    return getattr(stream, "runs_inline", False)  # torch's streams never do and have no such attribute


@cache
def default_runtime() -> Any:
    """`torch.cuda` where there is one, else the one emulated device of this process."""
    return torch.cuda if torch.cuda.is_available() else EmulatedDevice()


os.register_at_fork(after_in_child=default_runtime.cache_clear)  # an emulated device does not survive a fork
