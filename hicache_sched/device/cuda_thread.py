"""What a thread of ours asks of the CUDA driver once, before its first device call."""

from __future__ import annotations

import ctypes

from hicache_sched.device.cuda_driver import CudaDriver

_STREAM_CAPTURE_MODE_RELAXED = 2


def leave_global_capture_mode(index: int, driver: CudaDriver | None = None) -> None:
    """Let the calling thread query events while another thread captures a graph.

    A thread starts in the global capture mode, in which its event queries invalidate a capture that any other thread
    has begun in that mode (CUDA driver API, `cuThreadExchangeStreamCaptureMode`). That call needs a current context.

    :param index: the device, as `torch.cuda` numbers it.
    :param driver: the driver library, by default the system's.
    :raises CudaDriverError: a driver call failed.
    """
    driver = CudaDriver() if driver is None else driver
    driver.use_primary_context(index)
    mode = ctypes.c_int(_STREAM_CAPTURE_MODE_RELAXED)
    driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
