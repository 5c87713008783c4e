"""What the conformance tests need of a device beside its runtime interface: slow kernels, gates and memory.

Streams, events and waits are called on `machine.runtime` directly, as the package does.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from hicache_sched.device import EmulatedDevice
from hicache_sched.device.emulated_core import EngineName

# Streams that share a hardware queue wait for each other's gates; read when the context is made.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

WAIT = 30.0
"""Seconds after which anything that waits gives up."""


class Gate(Protocol):
    """Work that ends when it is told to."""

    def set(self) -> None: ...


class Machine(Protocol):
    """A device under test; work goes to the calling thread's current stream.

    Attributes:
        runtime: its runtime interface.
        where: torch device of its memory.
    """

    runtime: Any
    where: str

    def gate(self, engine: EngineName = "compute") -> Gate:
        """Hold up the current stream. On the emulated device `engine` is occupied meanwhile."""

    def slow(self) -> None:
        """A kernel that takes some 10 ms."""

    def kernel(self, work: Callable[[], object]) -> None:
        """`work` is torch operations on device memory."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy pinned host memory to the device, without blocking."""

    def cells(self, *values: int) -> torch.Tensor:
        """int64 device memory, ready to be used on any stream."""

    def host(self, *values: int) -> torch.Tensor:
        """Host memory that `copy` can read."""

    def read(self, tensor: torch.Tensor) -> list[int]:
        """What `tensor` holds, in order of the current stream."""

    def capturing(self) -> AbstractContextManager[None]:
        """Capture the current stream of the calling thread into a graph."""

    def open_gates(self) -> None:
        """Open all gates."""

    def close(self) -> None:
        """Open all gates and wait for everything."""


class CapturingDevice(EmulatedDevice):
    """An emulated device that can be told that the calling thread captures."""

    def __init__(self) -> None:
        super().__init__()
        self.capture = threading.local()

    def is_current_stream_capturing(self) -> bool:
        return getattr(self.capture, "active", False)


class EmulatedMachine:
    where = "cpu"

    def __init__(self) -> None:
        self.runtime: Any = CapturingDevice()
        self._gates: list[threading.Event] = []

    def gate(self, engine: EngineName = "compute") -> Gate:
        gate = threading.Event()
        self._gates.append(gate)
        self.runtime.launch(lambda: gate.wait(WAIT), engine=engine)
        return gate

    def slow(self) -> None:
        self.runtime.launch(lambda: None, duration=0.01)

    def kernel(self, work: Callable[[], object]) -> None:
        self.runtime.launch(work)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.runtime.launch(lambda: dst.copy_(src), engine="h2d")

    def cells(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64)

    host = cells

    def read(self, tensor: torch.Tensor) -> list[int]:
        values: list[int] = self.runtime.read([tensor])[0].tolist()
        return values

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self.runtime.capture.active = True
        try:
            yield
        finally:
            self.runtime.capture.active = False

    def open_gates(self) -> None:
        for gate in self._gates:
            gate.set()

    def close(self) -> None:
        self.open_gates()
        self.runtime.close()


class _CudaGate:
    """A stream that waits until a word of pinned host memory is set (CUDA driver API, `cuStreamWaitValue32`).

    Neither a spinning kernel, which could keep others from being loaded, nor a host function, of which only one
    runs at a time. It opens by itself when a test forgets it.
    """

    def __init__(self, stream: Any) -> None:
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
        wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        status = wait(stream.cuda_stream, self._word.data_ptr(), 1, 0)
        if status != 0:
            raise RuntimeError(f"cuStreamWaitValue32 failed with CUresult {status}")
        self._watchdog = threading.Timer(WAIT, self._word.fill_, [1])
        self._watchdog.daemon = True
        self._watchdog.start()

    def set(self) -> None:
        self._watchdog.cancel()
        self._word.fill_(1)


class CudaMachine:
    runtime: Any = torch.cuda
    where = "cuda"

    def __init__(self) -> None:
        self._gates: list[_CudaGate] = []
        self._warm_up()

    def _warm_up(self) -> None:
        """Loading a kernel, and allocating, may wait for the device, which must not happen behind a gate."""
        # Freed at once, and then given out again without asking the driver.
        _pinned = [torch.zeros(1, dtype=dtype, pin_memory=True) for dtype in (torch.int32, torch.int64) * 16]
        del _pinned
        cell, other = self.cells(1), self.cells(2)
        self.slow()
        for work in (lambda: cell.add_(1), lambda: cell.mul_(2), lambda: cell.fill_(3), lambda: cell.copy_(other)):
            self.kernel(work)
        self.copy(cell, self.host(1))
        self.read(cell)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            gate = self.gate()
        gate.set()
        torch.cuda.synchronize()

    def gate(self, engine: EngineName = "compute") -> Gate:
        gate = _CudaGate(torch.cuda.current_stream())
        self._gates.append(gate)
        return gate

    def slow(self) -> None:
        torch.cuda._sleep(20_000_000)  # cycles, at most some 2 per ns

    def kernel(self, work: Callable[[], object]) -> None:
        work()

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src, non_blocking=True)

    def cells(self, *values: int) -> torch.Tensor:
        cells = torch.tensor(values, dtype=torch.int64, device=self.where)
        torch.cuda.current_stream().synchronize()
        return cells

    def host(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).pin_memory()

    def read(self, tensor: torch.Tensor) -> list[int]:
        values: list[int] = tensor.cpu().tolist()
        return values

    @contextmanager
    def capturing(self) -> Iterator[None]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="global")
        try:
            yield
        finally:
            graph.capture_end()

    def open_gates(self) -> None:
        for gate in self._gates:
            gate.set()

    def close(self) -> None:
        self.open_gates()
        torch.cuda.synchronize()
