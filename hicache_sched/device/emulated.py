"""A device without hardware: CUDA's ordering rules over real bytes in CPU memory.

What is emulated and what is not: the ordering rules are CUDA's (the conformance suite states them and runs
against both), bytes really move, durations and bandwidths are stand-ins. Memory has one address space, so a host
read of "device" memory is ordered only where `read` or a synchronisation orders it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any, Self

import numpy as np
import torch

from hicache_sched import native
from hicache_sched.device.at_exit import stop_at_exit
from hicache_sched.device.copy_batch import CopyBatch
from hicache_sched.device.emulated_core import DeviceOperation, EmulatedCore, EngineName
from hicache_sched.device.native_core import NativeCore
from hicache_sched.device.python_core import PythonCore

DeviceCall = tuple[str, Any, "EmulatedStream", str]
"""One recorded call: its name, the object it was made on, the stream concerned, the calling thread's name."""


_NO_COPIES = np.empty(0, dtype=np.int64)
_NOTHING = CopyBatch(_NO_COPIES, _NO_COPIES, _NO_COPIES, 0, None)
"""What an operation does that only takes time; copies, since those need no GIL."""


class EmulatedEvent:
    """An event with the semantics of `torch.cuda.Event`.

    Never recorded, it is complete and waiting for it is a no-op. A wait captures the latest record at the time
    of the call. All methods may be called from any thread.
    """

    def __init__(self, device: EmulatedDevice, enable_timing: bool) -> None:
        self._device = device
        self._enable_timing = enable_timing
        self._core = device._core.new_event(self)

    def record(self, stream: EmulatedStream | None = None) -> None:
        """Record on `stream`, or on the calling thread's current stream."""
        stream = stream or self._device.current_stream()
        self._device._core.record(stream._core, self._core, "record", self, stream)

    def wait(self, stream: EmulatedStream | None = None) -> None:
        """Order what `stream` gets from now on behind the latest record; blocks where the stream runs inline."""
        stream = stream or self._device.current_stream()
        self._device._core.wait(stream._core, self._core, "wait", self, stream)

    def query(self) -> bool:
        """Whether the latest record has completed; True where there is none."""
        return self._device._core.is_done(self._core)

    def synchronize(self) -> None:
        """Block the calling thread until the latest record has completed."""
        self._device._core.synchronize(self._core, "synchronize", self, self._device.current_stream())

    def elapsed_time(self, end_event: EmulatedEvent) -> float:
        """Milliseconds of device time from this event's record to `end_event`'s.

        :raises RuntimeError: an event has no timing, was never recorded, or has not completed.
        """
        core = self._device._core
        core.check()
        if not (self._enable_timing and end_event._enable_timing):
            raise RuntimeError("elapsed_time needs two events made with enable_timing=True")
        start, end = (core.time_of(event._core) for event in (self, end_event))
        if start is None or end is None:
            raise RuntimeError("elapsed_time needs two events that were recorded and have completed")
        return (end - start) * 1e3


class EmulatedStream:
    """A FIFO queue of device work with the semantics of `torch.cuda.Stream`.

    Attributes:
        runs_inline: True for a thread's default stream: what is submitted to it is done when the call returns.
    """

    def __init__(self, device: EmulatedDevice, runs_inline: bool) -> None:
        self._device = device
        self._core = device._core.new_stream(self, runs_inline=runs_inline)
        self.runs_inline = runs_inline

    def record_event(self, event: EmulatedEvent | None = None) -> EmulatedEvent:
        event = event or self._device.Event()
        event.record(self)
        return event

    def wait_event(self, event: EmulatedEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: EmulatedStream) -> None:
        """Order what this stream gets from now on behind what `stream` has got so far."""
        self._device._core.wait_stream(self._core, stream._core, "wait_stream", stream, self)

    def query(self) -> bool:
        return self._device._core.length(self._core) == 0

    def synchronize(self) -> None:
        """Block the calling thread until everything submitted so far is done."""
        self._device._core.drain(self._core, "synchronize", self, self)


class _CurrentStream:
    """Context manager that makes a stream the calling thread's current one."""

    def __init__(self, device: EmulatedDevice, stream: EmulatedStream | None) -> None:
        self._device = device
        self._stream = stream

    def __enter__(self) -> EmulatedStream | None:
        if self._stream is not None:
            self._device._core.list_call("enter", self._stream, self._stream)
            self._before = self._device.current_stream()
            self._device._streams.current = self._stream
        return self._stream

    def __exit__(self, *exc_info: object) -> None:
        if self._stream is not None:
            self._device._streams.current = self._before
            self._device._core.list_call("leave", self._stream, self._stream)


class _Streams(threading.local):
    """The calling thread's streams. What a thread has not set it finds in the class: to look for it in vain is slow."""

    current: EmulatedStream | None = None
    default: EmulatedStream | None = None


class EmulatedDevice:
    """A runtime over CPU memory, with CUDA's ordering rules; usable wherever `torch.cuda` is.

    All methods may be called from any thread, except in a forked child, where they raise.

    :param h2d_bandwidth: bytes/s of the h2d engine, None for as fast as memory.
    :param d2h_bandwidth: bytes/s of the d2h engine, None for as fast as memory.
    :param queue_depth: operations, events and waits that a stream holds, None for any number. One more blocks the
        thread that submits it until there is room, and with it every thread that submits anything anywhere, as in a
        driver that keeps its lock meanwhile.
    """

    def __init__(
        self,
        h2d_bandwidth: float | None = None,
        d2h_bandwidth: float | None = None,
        *,
        queue_depth: int | None = None,
    ) -> None:
        for name, bandwidth in (("h2d_bandwidth", h2d_bandwidth), ("d2h_bandwidth", d2h_bandwidth)):
            if bandwidth is not None and not bandwidth > 0:
                raise ValueError(f"{name} must be positive bytes/s or None, not {bandwidth!r}")
        if queue_depth is not None and queue_depth < 1:
            raise ValueError(f"queue_depth must be at least 1 or None, not {queue_depth!r}")
        bandwidths: dict[EngineName, float | None] = {"compute": None, "h2d": h2d_bandwidth, "d2h": d2h_bandwidth}
        make_core: Callable[..., EmulatedCore] = PythonCore if native.module is None else NativeCore
        self._core = make_core(bandwidths, queue_depth)
        self._streams = _Streams()
        stop_at_exit(self)
        _devices.add(self)

    # -- the runtime interface ------------------------------------------------------------------------------

    def Stream(self, device: Any = None, priority: int = 0) -> EmulatedStream:  # noqa: N802 - torch's name
        return EmulatedStream(self, runs_inline=False)

    def Event(  # noqa: N802 - torch's name
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> EmulatedEvent:
        return EmulatedEvent(self, enable_timing)

    def stream(self, stream: EmulatedStream | None) -> _CurrentStream:
        """Context manager: `stream` is the calling thread's current stream inside; None changes nothing."""
        return _CurrentStream(self, stream)

    def current_stream(self, device: Any = None) -> EmulatedStream:
        return self._streams.current or self.default_stream()

    def default_stream(self, device: Any = None) -> EmulatedStream:
        """The calling thread's default stream, which runs inline."""
        default = self._streams.default
        if default is None:
            default = self._streams.default = EmulatedStream(self, runs_inline=True)
        return default

    def is_available(self) -> bool:
        return True

    def is_current_stream_capturing(self) -> bool:
        """Always False: stream capture is not emulated."""
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        self._core.check()

    def synchronize(self, device: Any = None) -> None:
        """Block the calling thread until every stream has done what it was given so far."""
        self._core.drain_all()

    # -- work -----------------------------------------------------------------------------------------------

    def launch(
        self, fn: Callable[[], Any] | None, *, engine: EngineName = "compute", duration: float = 0.0, nbytes: int = 0
    ) -> None:
        """Put `fn` on the calling thread's current stream.

        `fn` is Python and needs the GIL; pool copies use `enqueue_copies`. One that raises on an inline stream
        raises here; on any other stream it loses the device, as a faulting kernel does on CUDA.

        :param fn: None for one that does nothing but take its time, and needs no GIL to begin and to end, as a GPU
            needs none.
        :param engine: which engine it occupies.
        :param duration: seconds it takes at least.
        :param nbytes: bytes moved, paced by the engine's bandwidth on top of `duration`.
        """
        work = _NOTHING if fn is None else fn
        self._core.operate(self.current_stream()._core, engine, work, duration, nbytes)

    def enqueue_copies(self, batch: CopyBatch, *, engine: EngineName = "h2d") -> None:
        """Put one operation that makes all copies of `batch` on the calling thread's current stream.

        The memory must stay alive until it is done; `batch.owner` does, with the operation.
        """
        self._core.operate(self.current_stream()._core, engine, batch, 0.0, batch.nbytes)

    def read(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors to fresh memory in order of the current stream, as one operation, and wait for it: what
        `Tensor.cpu` does on a device."""
        results = [torch.empty_like(tensor) for tensor in tensors]
        # numpy, because torch would share a large copy among threads that other work keeps busy. Taken here, so that
        # a tensor without memory raises here.
        arrays = [(result.numpy(), tensor.numpy()) for result, tensor in zip(results, tensors, strict=True)]

        def move() -> None:
            for result, tensor in arrays:
                np.copyto(result, tensor)

        stream = self.current_stream()._core
        self._core.operate(stream, "d2h", move, 0.0, sum(tensor.nbytes for tensor in tensors))
        self._core.drain(stream)
        return results

    def handle_of(self, event: Any) -> int:
        """By which a native data plane knows an event of this device."""
        return native.module.address_of(event._core)  # type: ignore[no-any-return]

    def plane_device(self, h2d_stream: EmulatedStream, index_stream: EmulatedStream, names: tuple[str, str]) -> Any:
        """This device, as a native data plane calls it; None where its core is not native.

        :param names: of the two threads that will, the submitting one and the observing one.
        """
        if not isinstance(self._core, NativeCore):
            return None
        return self._core.plane_device(h2d_stream._core, index_stream._core, names)

    # -- for tests ------------------------------------------------------------------------------------------

    def hold(self, engine: EngineName) -> None:
        """Let no further operation of `engine` start; one that is running finishes."""
        self._core.hold(engine)

    def step(self, engine: EngineName, n: int = 1) -> None:
        """Let the next `n` operations of a held engine through and return when they are done.

        Operations that are not queued yet are waited for. Events and waits are not operations.
        """
        self._core.step(engine, n)

    def resume(self, engine: EngineName) -> None:
        """Undo `hold`."""
        self._core.resume(engine)

    def fail_next(self, engine: EngineName, exc: BaseException) -> None:
        """Make the next operation for `engine` raise `exc` when it is submitted; called twice, the next two."""
        self._core.fail_next(engine, exc)

    def lose(self, exc: BaseException) -> None:
        """Lose the device: what is queued is dropped and every call raises `exc`, blocked ones included."""
        self._core.stop(exc)

    def record_calls(self) -> MutableSequence[DeviceCall]:
        """From now on, list every stream and event call but queries, in order, and return that list."""
        return self._core.list_calls()

    def record_operations(self) -> MutableSequence[DeviceOperation]:
        """From now on, list what the engines do, in the order in which they complete it, and return that list.

        Their times are those at which the device says that they ran (see `DeviceOperation`), so on one engine they
        do not overlap. What raises on an inline stream is listed; what a lost device cuts short is not.
        """
        return self._core.list_operations()

    def close(self) -> None:
        """Stop the engines' threads; every later call raises. Idempotent."""
        self.stop_at_exit()
        self.join_at_exit(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def stop_at_exit(self) -> None:
        self._core.stop(RuntimeError("the emulated device is closed"))

    def join_at_exit(self, deadline: float | None) -> None:
        self._core.join(deadline)


_devices: weakref.WeakSet[EmulatedDevice] = weakref.WeakSet()


def _stop_all_in_child() -> None:
    for device in list(_devices):
        device._core.stop_in_child(
            RuntimeError("an emulated device does not survive a fork: its engines run in the parent only")
        )


os.register_at_fork(after_in_child=_stop_all_in_child)
