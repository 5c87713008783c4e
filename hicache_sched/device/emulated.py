"""A device without hardware: CUDA's ordering rules over real bytes in CPU memory.

Streams are FIFO queues; work of different streams is concurrent; each engine (compute, h2d, d2h) does one
operation at a time. Nothing runs on a stream of its own thread: whoever completes something moves every stream
that was waiting for it, and a stream whose head is an operation hands it to its engine. An engine has one thread,
parked while there is nothing for it to do.

What is emulated and what is not: the ordering rules are CUDA's (the conformance suite states them and runs
against both), bytes really move, durations and bandwidths are stand-ins. Memory has one address space, so a host
read of "device" memory is ordered only where `read` or a synchronisation orders it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue
from typing import Any, Final, Literal, Self, TypeAlias, TypeVar

import numpy as np
import torch

from hicache_sched.device.at_exit import stop_at_exit
from hicache_sched.device.copy_batch import CopyBatch

EngineName = Literal["compute", "h2d", "d2h"]
ENGINES: Final[tuple[EngineName, ...]] = ("compute", "h2d", "d2h")

DeviceCall = tuple[str, Any, "EmulatedStream", str]
"""One recorded call: its name, the object it was made on, the stream concerned, the calling thread's name."""


_Work: TypeAlias = Callable[[], Any] | CopyBatch
"""What an operation does. Copies are plain arrays."""


class _Record:
    """One recording of an event. Waits hold the recording, so a later one does not move them."""

    __slots__ = ("blocked", "done", "gates", "time")

    def __init__(self, now: float) -> None:
        self.time = now
        self.done = False
        self.gates: list[threading.Lock] = []
        self.blocked: list[EmulatedStream] = []


class _Wait:
    """A stream's wait for a recording."""

    __slots__ = ("parked", "record")

    def __init__(self, record: _Record) -> None:
        self.record = record
        self.parked = False


class _Operation:
    """Work for an engine. One with a `gate` runs on the thread that submitted it, once the gate opens."""

    __slots__ = ("duration", "engine", "gate", "handed_over", "ready_time", "stream", "work")

    def __init__(self, stream: EmulatedStream, engine: _Engine, work: _Work, duration: float, now: float) -> None:
        self.stream = stream
        self.engine = engine
        self.work = work
        self.duration = duration
        self.ready_time = now
        self.handed_over = False
        self.gate: threading.Lock | None = None


_ItemT = TypeVar("_ItemT", _Record, _Wait, _Operation)


class _Engine:
    """State of one engine, guarded by the device's lock, and its thread.

    The thread knows its device only while it runs an operation of it, so that a device which nobody refers to any
    more is collected and its threads end.
    """

    def __init__(self, name: EngineName, bandwidth: float | None, lock: threading.Lock) -> None:
        self.name = name
        self.bandwidth = bandwidth
        self.changed = threading.Condition(lock)
        self.hints: SimpleQueue[None] = SimpleQueue()
        self.stopped = False
        self.thread = threading.Thread(target=self._run, name=f"emulated-device-{name}", daemon=True)
        self.ready: deque[_Operation] = deque()
        self.running: _Operation | None = None
        self.free_time = 0.0
        self.held = False
        self.allowed = 0
        self.started = 0
        self.completed = 0
        self.failures: deque[BaseException] = deque()

    @property
    def may_start(self) -> bool:
        return self.running is None and bool(self.ready) and (not self.held or self.started < self.allowed)

    def stop(self) -> None:
        """End the thread. Takes no lock: it may be called by the garbage collector, in the middle of anything."""
        self.stopped = True
        self.hints.put(None)

    def _run(self) -> None:
        while True:
            self.hints.get()
            if self.stopped:
                return
            # Looked at without the lock: an operation that is handed to this thread stays until it is completed.
            operation = self.running
            if operation is not None and operation.gate is None:
                operation.stream._device._run_on_engine(operation)
            del operation  # a parked thread keeps nothing alive


def _closed_gate() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


def _open(gate: threading.Lock) -> None:
    if gate.locked():
        gate.release()


class EmulatedEvent:
    """An event with the semantics of `torch.cuda.Event`.

    Never recorded, it is complete and waiting for it is a no-op. A wait captures the latest record at the time
    of the call. All methods may be called from any thread.
    """

    def __init__(self, device: EmulatedDevice, enable_timing: bool) -> None:
        self._device = device
        self._enable_timing = enable_timing
        self._record: _Record | None = None

    def record(self, stream: EmulatedStream | None = None) -> None:
        """Record on `stream`, or on the calling thread's current stream."""
        device = self._device
        stream = stream or device.current_stream()
        with device._admission(stream):
            device._call("record", self, stream)
            self._record = device._submit(stream, _Record(time.monotonic()))

    def wait(self, stream: EmulatedStream | None = None) -> None:
        """Order what `stream` gets from now on behind the latest record; blocks where the stream runs inline."""
        device = self._device
        stream = stream or device.current_stream()
        with device._admission(stream):
            device._call("wait", self, stream)
            record = self._record
            if record is None or record.done:
                return
            device._submit(stream, _Wait(record))
        if stream.runs_inline:
            device._block_on(record)

    def query(self) -> bool:
        """Whether the latest record has completed; True where there is none."""
        with self._device._lock:
            self._device._check()
            return self._record is None or self._record.done

    def synchronize(self) -> None:
        """Block the calling thread until the latest record has completed."""
        device = self._device
        current = device.current_stream()
        with device._lock:
            device._call("synchronize", self, current)
            record = self._record
        if record is not None:
            device._block_on(record)

    def elapsed_time(self, end_event: EmulatedEvent) -> float:
        """Milliseconds of device time from this event's record to `end_event`'s.

        :raises RuntimeError: an event has no timing, was never recorded, or has not completed.
        """
        with self._device._lock:
            self._device._check()
            start, end = self._record, end_event._record
        if not (self._enable_timing and end_event._enable_timing):
            raise RuntimeError("elapsed_time needs two events made with enable_timing=True")
        if start is None or end is None or not (start.done and end.done):
            raise RuntimeError("elapsed_time needs two events that were recorded and have completed")
        return (end.time - start.time) * 1e3


class EmulatedStream:
    """A FIFO queue of device work with the semantics of `torch.cuda.Stream`.

    Attributes:
        runs_inline: True for a thread's default stream: what is submitted to it is done when the call returns.
    """

    def __init__(self, device: EmulatedDevice, runs_inline: bool) -> None:
        self._device = device
        self.runs_inline = runs_inline
        self._queue: deque[_Record | _Wait | _Operation] = deque()
        self._time = 0.0

    def record_event(self, event: EmulatedEvent | None = None) -> EmulatedEvent:
        event = event or self._device.Event()
        event.record(self)
        return event

    def wait_event(self, event: EmulatedEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: EmulatedStream) -> None:
        """Order what this stream gets from now on behind what `stream` has got so far."""
        device = self._device
        with device._admission(self, stream):
            device._call("wait_stream", stream, self)
            record = device._submit(stream, _Record(time.monotonic()))
            if record.done:
                return
            device._submit(self, _Wait(record))
        if self.runs_inline:
            device._block_on(record)

    def query(self) -> bool:
        with self._device._lock:
            self._device._check()
            return not self._queue

    def synchronize(self) -> None:
        """Block the calling thread until everything submitted so far is done."""
        device = self._device
        with device._lock:
            device._call("synchronize", self, self)
            record = device._submit(self, _Record(time.monotonic()))
        device._block_on(record)


class _CurrentStream:
    """Context manager that makes a stream the calling thread's current one."""

    def __init__(self, device: EmulatedDevice, stream: EmulatedStream | None) -> None:
        self._device = device
        self._stream = stream

    def __enter__(self) -> EmulatedStream | None:
        if self._stream is not None:
            with self._device._lock:
                self._device._log_call("enter", self._stream, self._stream)
            self._before = self._device.current_stream()
            self._device._local.current = self._stream
        return self._stream

    def __exit__(self, *exc_info: object) -> None:
        if self._stream is not None:
            self._device._local.current = self._before
            with self._device._lock:
                self._device._log_call("leave", self._stream, self._stream)


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
        self._lock = threading.Lock()
        self._driver_lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._queue_depth = queue_depth
        bandwidths: dict[EngineName, float | None] = {"compute": None, "h2d": h2d_bandwidth, "d2h": d2h_bandwidth}
        self._engines = {name: _Engine(name, bandwidths[name], self._lock) for name in ENGINES}
        self._streams: weakref.WeakSet[EmulatedStream] = weakref.WeakSet()
        self._local = threading.local()
        self._gates: set[threading.Lock] = set()
        self._error: BaseException | None = None
        self._calls: list[DeviceCall] | None = None
        for engine in self._engines.values():
            engine.thread.start()
            weakref.finalize(self, engine.stop).atexit = False  # `stop_at_exit` does that in its order
        stop_at_exit(self)
        _devices.add(self)

    # -- the runtime interface ------------------------------------------------------------------------------

    def Stream(self, device: Any = None, priority: int = 0) -> EmulatedStream:  # noqa: N802 - torch's name
        with self._lock:
            self._check()
            return self._new_stream(runs_inline=False)

    def Event(  # noqa: N802 - torch's name
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> EmulatedEvent:
        with self._lock:
            self._check()
        return EmulatedEvent(self, enable_timing)

    def stream(self, stream: EmulatedStream | None) -> _CurrentStream:
        """Context manager: `stream` is the calling thread's current stream inside; None changes nothing."""
        return _CurrentStream(self, stream)

    def current_stream(self, device: Any = None) -> EmulatedStream:
        current: EmulatedStream | None = getattr(self._local, "current", None)
        return current or self.default_stream()

    def default_stream(self, device: Any = None) -> EmulatedStream:
        """The calling thread's default stream, which runs inline."""
        default: EmulatedStream | None = getattr(self._local, "default", None)
        if default is None:
            with self._lock:
                default = self._local.default = self._new_stream(runs_inline=True)
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
        with self._lock:
            self._check()

    def synchronize(self, device: Any = None) -> None:
        """Block the calling thread until every stream has done what it was given so far."""
        with self._lock:
            self._check()
            records = [self._submit(stream, _Record(time.monotonic())) for stream in list(self._streams)]
        for record in records:
            self._block_on(record)

    # -- work -----------------------------------------------------------------------------------------------

    def launch(
        self, fn: Callable[[], Any], *, engine: EngineName = "compute", duration: float = 0.0, nbytes: int = 0
    ) -> None:
        """Put `fn` on the calling thread's current stream.

        `fn` is Python and needs the GIL; pool copies use `enqueue_copies`. One that raises on an inline stream
        raises here; on any other stream it loses the device, as a faulting kernel does on CUDA.

        :param engine: which engine it occupies.
        :param duration: seconds it takes at least.
        :param nbytes: bytes moved, paced by the engine's bandwidth on top of `duration`.
        """
        self._enqueue(fn, engine, duration, nbytes)

    def enqueue_copies(self, batch: CopyBatch, *, engine: EngineName = "h2d") -> None:
        """Put one operation that makes all copies of `batch` on the calling thread's current stream.

        The memory must stay alive until it is done; `batch.owner` does, with the operation.
        """
        self._enqueue(batch, engine, 0.0, batch.nbytes)

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

        stream = self.current_stream()
        self._enqueue(move, "d2h", 0.0, sum(tensor.nbytes for tensor in tensors))
        with self._lock:
            self._check()
            record = self._submit(stream, _Record(time.monotonic()))
        self._block_on(record)
        return results

    # -- for tests ------------------------------------------------------------------------------------------

    def hold(self, engine: EngineName) -> None:
        """Let no further operation of `engine` start; one that is running finishes."""
        with self._lock:
            state = self._engine(engine)
            if not state.held:
                state.held = True
                state.allowed = state.started

    def step(self, engine: EngineName, n: int = 1) -> None:
        """Let the next `n` operations of a held engine through and return when they are done.

        Operations that are not queued yet are waited for. Events and waits are not operations.
        """
        with self._lock:
            state = self._engine(engine)
            self._check()
            if not state.held:
                raise RuntimeError(f"step() needs a held engine: call hold({engine!r}) first")
            state.free_time = max(state.free_time, time.monotonic())
            state.allowed += n
            target = state.allowed
            self._dispatch(state)
            while state.completed < target:
                state.changed.wait()
                self._check()

    def resume(self, engine: EngineName) -> None:
        """Undo `hold`."""
        with self._lock:
            state = self._engine(engine)
            state.held = False
            state.free_time = max(state.free_time, time.monotonic())
            self._dispatch(state)

    def fail_next(self, engine: EngineName, exc: BaseException) -> None:
        """Make the next operation for `engine` raise `exc` when it is submitted; called twice, the next two."""
        with self._lock:
            self._engine(engine).failures.append(exc)

    def lose(self, exc: BaseException) -> None:
        """Lose the device: what is queued is dropped and every call raises `exc`, blocked ones included."""
        with self._lock:
            self._stop(exc)

    def record_calls(self) -> list[DeviceCall]:
        """From now on, list every stream and event call but queries, in order, and return that list."""
        with self._lock:
            self._calls = []
            return self._calls

    def close(self) -> None:
        """Stop the engines' threads; every later call raises. Idempotent."""
        self.stop_at_exit()
        self.join_at_exit(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def stop_at_exit(self) -> None:
        with self._lock:
            self._stop(RuntimeError("the emulated device is closed"))

    def join_at_exit(self, deadline: float | None) -> None:
        for engine in self._engines.values():
            if engine.thread is not threading.current_thread():
                engine.thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    # -- inside; the lock is held where not said otherwise ----------------------------------------------------

    def _engine(self, name: str) -> _Engine:
        for engine in self._engines.values():
            if engine.name == name:
                return engine
        raise ValueError(f"no engine named {name!r}; there are {', '.join(ENGINES)}")

    def _new_stream(self, runs_inline: bool) -> EmulatedStream:
        stream = EmulatedStream(self, runs_inline)
        self._streams.add(stream)
        return stream

    def _admission(self, *streams: EmulatedStream) -> AbstractContextManager[Any]:
        """The lock, held once there is room on `streams`. It is not held yet."""
        return self._lock if self._queue_depth is None else self._with_room(streams, self._queue_depth)

    @contextmanager
    def _with_room(self, streams: Sequence[EmulatedStream], depth: int) -> Iterator[None]:
        with self._driver_lock, self._lock:
            while self._error is None and any(len(stream._queue) >= depth for stream in streams):
                self._room.wait()
            yield

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _call(self, name: str, obj: object, stream: EmulatedStream) -> None:
        self._check()
        self._log_call(name, obj, stream)

    def _log_call(self, name: str, obj: object, stream: EmulatedStream) -> None:
        if self._calls is not None:
            self._calls.append((name, obj, stream, threading.current_thread().name))

    def _stop(self, exc: BaseException) -> None:
        """Make every call raise `exc`, drop what is queued, wake every thread."""
        if self._error is None:
            self._error = exc
        for gate in self._gates:
            _open(gate)
        for engine in self._engines.values():
            engine.ready.clear()
            engine.changed.notify_all()
            engine.stop()
        for stream in self._streams:
            stream._queue.clear()
        self._room.notify_all()

    def _stop_in_child(self) -> None:
        """A forked child has copies of the locks, in whatever state they were, and none of the threads."""
        self._lock, self._driver_lock = threading.Lock(), threading.Lock()
        self._room = threading.Condition(self._lock)
        for engine in self._engines.values():
            engine.changed = threading.Condition(self._lock)
        with self._lock:
            self._stop(RuntimeError("an emulated device does not survive a fork: its engines run in the parent only"))

    def _enqueue(self, work: _Work, engine: EngineName, duration: float, nbytes: int) -> None:
        """Submit an operation to the current stream and, where that runs inline, do it. The lock is not held."""
        stream = self.current_stream()
        with self._admission(stream):
            state = self._engine(engine)
            self._check()
            if state.failures:
                raise state.failures.popleft()
            if state.bandwidth is not None:
                duration += nbytes / state.bandwidth
            operation = _Operation(stream, state, work, duration, time.monotonic())
            if stream.runs_inline:
                operation.gate = _closed_gate()
                self._gates.add(operation.gate)
            self._submit(stream, operation)
        if operation.gate is not None:
            self._run_inline(operation, operation.gate)

    def _run_inline(self, operation: _Operation, gate: threading.Lock) -> None:
        """Wait for the engine, then run the operation on the calling thread. The lock is not held."""
        finished = 0.0
        try:
            gate.acquire()
            with self._lock:
                self._check()
            finished = self._perform(operation)
        finally:
            with self._lock:
                self._gates.discard(gate)
                if operation.engine.running is operation:
                    self._complete(operation, finished or time.monotonic())
                else:  # interrupted before its turn: the engine's thread makes nothing of it when that comes
                    operation.work, operation.duration, operation.gate = _nothing, 0.0, None
        with self._lock:
            self._check()  # lost in the middle of it

    def _perform(self, operation: _Operation) -> float:
        """Do the work and let its duration pass; return its virtual completion time. The lock is not held.

        The next operation starts, virtually, when this one virtually ended, so what a sleep overshoots is made
        up for by the next and pacing does not drift.
        """
        engine = operation.engine
        start = max(operation.ready_time, engine.free_time)
        work = operation.work
        if isinstance(work, CopyBatch):
            work.execute()
        else:
            work()
        finished = max(start + operation.duration, time.monotonic())
        with self._lock:
            while self._error is None and (remaining := finished - time.monotonic()) > 0:
                engine.changed.wait(remaining)
        return finished

    def _run_on_engine(self, operation: _Operation) -> None:
        """Do an operation on its engine's thread. The lock is not held."""
        try:
            finished = self._perform(operation)
        except BaseException as exc:
            self.lose(exc)
            return
        with self._lock:
            self._complete(operation, finished)

    def _submit(self, stream: EmulatedStream, item: _ItemT) -> _ItemT:
        if isinstance(item, _Record) and not stream._queue:  # nothing to wait for, and nobody waits for it yet
            item.time = stream._time = max(item.time, stream._time)
            item.done = True
            return item
        stream._queue.append(item)
        if len(stream._queue) == 1:
            self._advance(stream)
        return item

    def _advance(self, stream: EmulatedStream) -> None:
        """Take from the stream's head what can be taken, and from every stream that this unblocks."""
        pending = [stream]
        while pending:
            stream = pending.pop()
            queue = stream._queue
            while queue:
                item = queue[0]
                if isinstance(item, _Record):
                    item.time = stream._time = max(item.time, stream._time)
                    item.done = True
                    for gate in item.gates:
                        _open(gate)
                    pending.extend(item.blocked)
                    item.blocked.clear()
                elif isinstance(item, _Wait):
                    if not item.record.done:
                        if not item.parked:
                            item.parked = True
                            item.record.blocked.append(stream)
                        break
                    stream._time = max(stream._time, item.record.time)
                else:
                    if not item.handed_over:
                        item.handed_over = True
                        item.ready_time = max(item.ready_time, stream._time)
                        item.engine.ready.append(item)
                        self._dispatch(item.engine)
                    break
                queue.popleft()
                if self._queue_depth is not None:
                    self._room.notify_all()

    def _dispatch(self, engine: _Engine) -> None:
        if not engine.may_start:
            return
        operation = engine.running = engine.ready.popleft()
        engine.started += 1
        if operation.gate is not None:
            _open(operation.gate)
        else:
            engine.hints.put(None)

    def _complete(self, operation: _Operation, finished: float) -> None:
        engine, stream = operation.engine, operation.stream
        engine.running = None
        engine.free_time = finished
        engine.completed += 1
        stream._time = finished
        if self._error is None:
            stream._queue.popleft()
            if self._queue_depth is not None:
                self._room.notify_all()
            self._advance(stream)
            self._dispatch(engine)
        engine.changed.notify_all()

    def _block_on(self, record: _Record) -> None:
        """Block the calling thread until `record` is done or the device is lost. The lock is not held."""
        with self._lock:
            self._check()
            if record.done:
                return
            gate = _closed_gate()
            record.gates.append(gate)
            self._gates.add(gate)
        try:
            gate.acquire()
        finally:
            with self._lock:
                self._gates.discard(gate)
        with self._lock:
            if not record.done:
                self._check()


def _nothing() -> None:
    return None


_devices: weakref.WeakSet[EmulatedDevice] = weakref.WeakSet()


def _stop_all_in_child() -> None:
    for device in list(_devices):
        device._stop_in_child()


os.register_at_fork(after_in_child=_stop_all_in_child)
