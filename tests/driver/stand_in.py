"""The driver stand-in, from Python."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.cuda_driver import CudaDriver

STREAM = 0x5EED
"""Handle of the only stream that there is."""


class StandIn(CudaDriver):
    """`CudaDriver` over the stand-in, and what tests ask of that.

    Attributes:
        lib: the library.
    """

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path))
        self.lib.stand_in_copies.restype = ctypes.c_size_t
        super().__init__(self.lib)
        self.reset()

    def reset(self, version: int = 12080, *, has_failure_index: bool = True) -> None:
        """Forget all memory and settings."""
        self.lib.stand_in_reset(version, has_failure_index, ctypes.c_void_p(STREAM))

    def knows(self, *, host: Iterable[torch.Tensor] = (), device: Iterable[torch.Tensor] = ()) -> None:
        """Page-locked memory of one registration each, and device memory."""
        for tensor in host:
            self.lib.stand_in_host_memory(ctypes.c_uint64(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes))
        for tensor in device:
            self.lib.stand_in_device_memory(ctypes.c_uint64(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes))

    def fail(self, copy: int, status: int) -> None:
        """Refuse this copy of every batch from now on."""
        self.lib.stand_in_fail(ctypes.c_long(copy), status)

    @property
    def num_registrations(self) -> int:
        return int(self.lib.stand_in_registrations())


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
