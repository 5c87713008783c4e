"""Page-locked memory for host pools."""

from __future__ import annotations

import mmap
import os
import resource
import weakref
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from hicache_sched.device.cuda_driver import CudaDriver, CudaDriverError
from hicache_sched.errors import HiCacheSchedError


def pinned_bytes(sizes: Sequence[int], driver: CudaDriver) -> list[torch.Tensor]:
    """Zero-filled page-locked memory, each piece one registration of its own, undone when its tensor goes.

    Registered rather than taken from torch, whose allocator rounds what it locks up to a power of two.

    :param sizes: bytes of each piece.
    :param driver: the CUDA driver; a context has to be current.
    :return: for each size a tensor, uint8 [size].
    :raises HiCacheSchedError: not all of it can be locked; then none of it is.
    """
    pieces: list[torch.Tensor] = []
    for size in sizes:
        try:
            pieces.append(_registered(size, driver))
        except (CudaDriverError, OSError) as exc:
            locked = len(pieces)
            pieces.clear()  # which undoes what was registered
            raise HiCacheSchedError(
                f"cannot page-lock {_gib(sum(sizes))} of host memory for a pool: {exc} at {_gib(size)}, "
                f"after {_gib(sum(sizes[:locked]))}, now unlocked again. {_limits()}. Make the pool smaller, raise the "
                "limit, or pass pin=False, at the cost of an extra copy of every page"
            ) from exc
    return pieces


class _Memory:
    """Memory for numpy's array interface, which keeps this object, and with it the memory, for the arrays it makes."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def _registered(size: int, driver: CudaDriver) -> torch.Tensor:
    # Pages of its own: no two registrations may share one.
    mapping = mmap.mmap(-1, size)
    address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    driver.register(address, size)
    memory = _Memory(address, size)
    # The mapping is held by the finalizer, so it outlives the registration.
    unlock = weakref.finalize(memory, _unregister, driver, address, mapping, os.getpid())
    unlock.atexit = False  # the process is about to give everything back, and the driver may be gone already
    return torch.from_numpy(np.asarray(memory))


def _unregister(driver: CudaDriver, address: int, mapping: mmap.mmap, pid: int) -> None:
    if os.getpid() == pid:  # CUDA cannot be used in a forked child, and the registration is the parent's
        with suppress(CudaDriverError):  # a lost device; there is nobody to tell
            driver.unregister(address)


def _limits() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "unlimited" if soft == resource.RLIM_INFINITY else _gib(soft)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"The limit of locked memory (ulimit -l) is {locked}, and {_gib(available)} of memory is free"


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
