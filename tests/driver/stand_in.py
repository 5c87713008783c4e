"""The driver stand-in, from Python."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.cuda_driver import CudaDriver

STREAM = 0x5EED
"""Handle of the stream that there always is: the h2d stream."""
INDEX_STREAM = 0x1DE
ENGINE_STREAM = 0xE61
"""Handles of two more, made by `StandIn.more_streams`."""

Copy = tuple[int, int, int]
"""To, from, bytes."""


class Call(NamedTuple):
    """One call of the driver.

    Attributes:
        args: what of its arguments tests look at, in order.
        copies: those of a batch.
    """

    name: str
    args: tuple[int, ...]
    copies: list[Copy]


class StandIn(CudaDriver):
    """`CudaDriver` over the stand-in, and what tests ask of that.

    Attributes:
        lib: the library.
    """

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path))
        for name in ("stand_in_copies", "stand_in_call_num_copies"):
            getattr(self.lib, name).restype = ctypes.c_size_t
        for name in ("stand_in_call_arg", "stand_in_call_copy"):
            getattr(self.lib, name).restype = ctypes.c_uint64
        self.lib.stand_in_call_name.restype = ctypes.c_char_p
        super().__init__(self.lib)
        self.reset()

    def reset(self, version: int = 12080, *, has_failure_index: bool = True) -> None:
        """Forget all memory and settings, every event and every stream but one."""
        self.lib.stand_in_reset(version, has_failure_index, ctypes.c_void_p(STREAM))

    def more_streams(self) -> None:
        for handle in (INDEX_STREAM, ENGINE_STREAM):
            self.lib.stand_in_stream(ctypes.c_void_p(handle))

    def knows(self, *, host: Iterable[torch.Tensor] = (), device: Iterable[torch.Tensor] = ()) -> None:
        """Page-locked memory of one registration each, and device memory."""
        for tensor in host:
            self.lib.stand_in_host_memory(ctypes.c_uint64(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes))
        for tensor in device:
            self.lib.stand_in_device_memory(ctypes.c_uint64(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes))

    def fail(self, copy: int, status: int) -> None:
        """Refuse this copy of every batch from now on."""
        self.lib.stand_in_fail(ctypes.c_long(copy), status)

    def fail_calls(self, name: str = "", *, spared: int = 0, count: int = 1, status: int = 2) -> None:
        """Have calls fail and do nothing, those of one function or of any.

        :param spared: calls before the first that fails.
        :param count: how many fail, -1 for all.
        """
        self.lib.stand_in_fail_calls(name.encode(), ctypes.c_long(spared), ctypes.c_long(count), status)

    def hold(self, stream: int) -> None:
        """Have a stream do nothing until it is released."""
        self.lib.stand_in_hold(ctypes.c_void_p(stream), 1)

    def release(self, stream: int) -> None:
        self.lib.stand_in_hold(ctypes.c_void_p(stream), 0)

    def new_event(self) -> int:
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
        assert event.value is not None
        return event.value

    def record(self, event: int, stream: int) -> None:
        self.call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def forget_calls(self) -> None:
        self.lib.stand_in_forget_calls()

    def calls(self, name: str = "") -> list[Call]:
        """Calls that were made, those of one function or all."""
        made = [self._call(number) for number in range(self.lib.stand_in_num_calls())]
        return [call for call in made if name in ("", call.name)]

    @property
    def num_registrations(self) -> int:
        return int(self.lib.stand_in_registrations())

    @property
    def num_allocations(self) -> int:
        """Pieces of host memory that it has allocated and that are there."""
        return int(self.lib.stand_in_allocations())

    @property
    def num_events(self) -> int:
        return int(self.lib.stand_in_events())

    @property
    def freed_too_early(self) -> bool:
        """Whether memory was freed that the device was still going to write to."""
        return bool(self.lib.stand_in_too_early())

    def _call(self, number: int) -> Call:
        lib = self.lib
        words = [
            lib.stand_in_call_copy(number, ctypes.c_size_t(which))
            for which in range(3 * lib.stand_in_call_num_copies(number))
        ]
        return Call(
            lib.stand_in_call_name(number).decode(),
            tuple(lib.stand_in_call_arg(number, arg) for arg in range(lib.stand_in_call_num_args(number))),
            list(zip(words[::3], words[1::3], words[2::3], strict=True)),
        )


class Stream:
    """A stream of `torch.cuda`, as far as batches look at one."""

    def __init__(self, handle: int = STREAM) -> None:
        self.cuda_stream = handle


class CudaLikeRuntime:
    """`torch.cuda`, as far as batches look at it."""

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: Any = None) -> Stream:
        return Stream()


def cuda_like() -> DeviceBinding:
    """A binding that passes for one of `torch.cuda`."""
    binding = DeviceBinding(CudaLikeRuntime())
    binding.is_cuda = True
    return binding
