"""What a thread of ours asks of the CUDA driver once, before its first device call."""

from __future__ import annotations

import ctypes
from typing import Any

_STREAM_CAPTURE_MODE_RELAXED = 2


def leave_global_capture_mode(index: int, driver: Any = None) -> None:
    """Let the calling thread query events while another thread captures a graph.

    A thread starts in the global capture mode, in which its event queries invalidate a capture that any other thread
    has begun in that mode (CUDA driver API, `cuThreadExchangeStreamCaptureMode`). That call needs a current context,
    and `torch.cuda.set_device` need not make one on a new thread; the primary context is the one torch uses.

    :param index: the device, as `torch.cuda` numbers it.
    :param driver: the driver library, by default the system's.
    :raises RuntimeError: a driver call failed.
    """
    driver = ctypes.CDLL("libcuda.so.1") if driver is None else driver
    context = ctypes.c_void_p()
    _call(driver.cuCtxGetCurrent, ctypes.byref(context))
    if not context.value:
        device = ctypes.c_int()
        _call(driver.cuDeviceGet, ctypes.byref(device), ctypes.c_int(index))
        _call(driver.cuDevicePrimaryCtxRetain, ctypes.byref(context), device)
        _call(driver.cuCtxSetCurrent, context)
        # torch holds the primary context for the life of the process, so ours need not.
        _call(driver.cuDevicePrimaryCtxRelease_v2, device)
    mode = ctypes.c_int(_STREAM_CAPTURE_MODE_RELAXED)
    _call(driver.cuThreadExchangeStreamCaptureMode, ctypes.byref(mode))


def _call(function: Any, *args: Any) -> None:
    status = function(*args)
    if status != 0:
        raise RuntimeError(f"{getattr(function, '__name__', function)} failed with CUresult {status}")
