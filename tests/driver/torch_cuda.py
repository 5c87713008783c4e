"""`torch.cuda` over the driver stand-in, as far as a scheduler uses it. Device memory is CPU memory."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hicache_sched.device.cuda_driver import CudaDriverError
from tests.driver.stand_in import StandIn

NOT_READY = 600  # CUDA_ERROR_NOT_READY


class CudaEvent:
    """Has a CUDA event from its first record on, as torch's have."""

    def __init__(self, runtime: TorchCuda) -> None:
        self._runtime = runtime
        self.cuda_event = 0

    def record(self, stream: CudaStream | None = None) -> None:
        driver = self._runtime.driver
        if not self.cuda_event:
            self.cuda_event = driver.new_event()
        driver.record(self.cuda_event, (stream or self._runtime.current_stream()).cuda_stream)

    def wait(self, stream: CudaStream | None = None) -> None:
        (stream or self._runtime.current_stream()).wait_event(self)

    def query(self) -> bool:
        return not self.cuda_event or self._runtime.ask("cuEventQuery", self.cuda_event)

    def synchronize(self) -> None:
        if self.cuda_event:
            self._runtime.driver.call("cuEventSynchronize", ctypes.c_void_p(self.cuda_event))

    def elapsed_time(self, end_event: CudaEvent) -> float:
        return 0.0


class CudaStream:
    def __init__(self, runtime: TorchCuda, handle: int) -> None:
        self._runtime = runtime
        self.cuda_stream = handle

    def wait_event(self, event: CudaEvent) -> None:
        if event.cuda_event:
            handles = map(ctypes.c_void_p, (self.cuda_stream, event.cuda_event))
            self._runtime.driver.call("cuStreamWaitEvent", *handles, ctypes.c_uint(0))

    def wait_stream(self, stream: CudaStream) -> None:
        event = CudaEvent(self._runtime)
        event.record(stream)
        self.wait_event(event)

    def query(self) -> bool:
        return self._runtime.ask("cuStreamQuery", self.cuda_stream)

    def synchronize(self) -> None:
        event = CudaEvent(self._runtime)
        event.record(self)
        event.synchronize()


class TorchCuda:
    """The runtime; streams besides the default one are made with the driver's help."""

    def __init__(self, driver: StandIn) -> None:
        self.driver = driver
        self._handles = itertools.count(0x1000, 0x10)
        self._default = CudaStream(self, self._new_handle())  # not 0, as a stand-in for an engine's current stream
        self._local = threading.local()

    def Stream(self, device: Any = None) -> CudaStream:  # noqa: N802 - torch's name
        return CudaStream(self, self._new_handle())

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> CudaEvent:  # noqa: N802 - torch's name
        assert blocking, "a wait would spin"
        return CudaEvent(self)

    def current_stream(self, device: Any = None) -> CudaStream:
        current: CudaStream = getattr(self._local, "current", self._default)
        return current

    @contextmanager
    def stream(self, stream: CudaStream) -> Iterator[None]:
        before, self._local.current = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.current = before

    def current_device(self) -> int:
        return 0

    def set_device(self, device: int) -> None:
        pass

    def ask(self, function: str, handle: int) -> bool:
        try:
            self.driver.call(function, ctypes.c_void_p(handle))
        except CudaDriverError as exc:
            if exc.status != NOT_READY:
                raise
            return False
        return True

    def _new_handle(self) -> int:
        handle = next(self._handles)
        self.driver.lib.stand_in_stream(ctypes.c_void_p(handle))
        return handle
