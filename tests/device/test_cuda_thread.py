"""The driver calls of a new thread, on a driver that only writes them down."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from hicache_sched.device.cuda_driver import CudaDriver
from hicache_sched.device.cuda_thread import leave_global_capture_mode


class WritingDriver:
    """Answers every call with success, or with the status it was told to give."""

    def __init__(self, current_context: int | None, failing: str | None = None) -> None:
        self.calls: list[str] = []
        self.mode: int | None = None
        self._current_context = current_context
        self._failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append(name)
            if name == "cuCtxGetCurrent":
                args[0]._obj.value = self._current_context
            if name == "cuThreadExchangeStreamCaptureMode":
                self.mode = ctypes.cast(args[0], ctypes.POINTER(ctypes.c_int)).contents.value
            return 999 if name == self._failing else 0

        call.__name__ = name
        return call


def test_a_thread_with_a_context_only_leaves_the_global_capture_mode() -> None:
    driver = WritingDriver(current_context=1)
    leave_global_capture_mode(0, CudaDriver(driver))
    assert driver.calls == ["cuCtxGetCurrent", "cuThreadExchangeStreamCaptureMode"]
    assert driver.mode == 2, "CU_STREAM_CAPTURE_MODE_RELAXED"


def test_a_thread_without_a_context_first_takes_the_primary_one() -> None:
    driver = WritingDriver(current_context=None)
    leave_global_capture_mode(3, CudaDriver(driver))
    assert driver.calls == [
        "cuCtxGetCurrent",
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
        "cuDevicePrimaryCtxRelease_v2",
        "cuThreadExchangeStreamCaptureMode",
    ]


def test_a_driver_call_that_fails_is_named() -> None:
    driver = WritingDriver(current_context=1, failing="cuThreadExchangeStreamCaptureMode")
    with pytest.raises(RuntimeError, match="cuThreadExchangeStreamCaptureMode failed with CUresult 999"):
        leave_global_capture_mode(0, CudaDriver(driver))
