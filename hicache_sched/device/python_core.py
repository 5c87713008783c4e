"""`EmulatedCore` in Python.

Streams are FIFO queues; work of different streams is concurrent; each engine (compute, h2d, d2h) does one
operation at a time. Nothing runs on a stream of its own thread: whoever completes something moves every stream
that was waiting for it, and a stream whose head is an operation hands it to its engine. An engine has one thread,
parked while there is nothing for it to do.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from hicache_sched.device.copy_batch import CopyBatch
from hicache_sched.device.emulated_core import ENGINES, DeviceOperation, EngineName, Work


class Record:
    """One recording of an event. Waits hold the recording, so a later one does not move them.

    Attributes:
        done: whether its stream has got there.
        time: when it did, in virtual time (`time.monotonic` seconds).
    """

    __slots__ = ("blocked", "done", "gates", "time")

    def __init__(self, now: float) -> None:
        self.time = now
        self.done = False
        self.gates: list[threading.Lock] = []
        self.blocked: list[CoreStream] = []


class CoreEvent:
    """What is recorded again and again; guarded by the core's lock.

    Attributes:
        record: its latest recording, None before the first.
    """

    __slots__ = ("record",)

    def __init__(self) -> None:
        self.record: Record | None = None


class _Wait:
    """A stream's wait for a recording."""

    __slots__ = ("parked", "record")

    def __init__(self, record: Record) -> None:
        self.record = record
        self.parked = False


class _Operation:
    """Work for an engine. One with a `gate` runs on the thread that submitted it, once the gate opens."""

    __slots__ = ("duration", "engine", "gate", "handed_over", "ready_time", "start_time", "stream", "work")

    def __init__(self, stream: CoreStream, engine: _Engine, work: Work, duration: float, now: float) -> None:
        self.stream = stream
        self.engine = engine
        self.work = work
        self.duration = duration
        self.ready_time = now
        self.start_time = 0.0  # virtual, once it is its engine's turn
        self.handed_over = False
        self.gate: threading.Lock | None = None


_ItemT = TypeVar("_ItemT", Record, _Wait, _Operation)


class CoreStream:
    """The queue behind a stream, guarded by the core's lock.

    Attributes:
        owner: what the stream is listed as.
        runs_inline: whether its operations are done by the thread that submits them.
    """

    __slots__ = ("__weakref__", "core", "owner", "queue", "runs_inline", "time")

    def __init__(self, core: PythonCore, owner: object, runs_inline: bool) -> None:
        self.core = core
        self.owner = weakref.ref(owner)
        self.runs_inline = runs_inline
        self.queue: deque[Record | _Wait | _Operation] = deque()
        self.time = 0.0


class _Engine:
    """State of one engine, guarded by the core's lock, and its thread.

    The thread knows its core only while it runs an operation of it, so that a device which nobody refers to any
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
                operation.stream.core._run_on_engine(operation)
            del operation  # a parked thread keeps nothing alive


def _closed_gate() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


def _open(gate: threading.Lock) -> None:
    if gate.locked():
        gate.release()


class PythonCore:
    """See `EmulatedCore`.

    :param bandwidths: bytes/s of each engine, None for as fast as memory.
    :param queue_depth: see `EmulatedDevice`.
    """

    def __init__(self, bandwidths: dict[EngineName, float | None], queue_depth: int | None) -> None:
        self._lock = threading.Lock()
        self._driver_lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._queue_depth = queue_depth
        self._engines = {name: _Engine(name, bandwidths[name], self._lock) for name in ENGINES}
        self._streams: weakref.WeakSet[CoreStream] = weakref.WeakSet()
        self._gates: set[threading.Lock] = set()
        self._error: BaseException | None = None
        self._calls: list[Any] | None = None
        self._operations: list[DeviceOperation] | None = None
        for engine in self._engines.values():
            engine.thread.start()
            weakref.finalize(self, engine.stop).atexit = False  # its device does that in its order

    def check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)

    def list_calls(self) -> list[Any]:
        with self._lock:
            self._calls = []
            return self._calls

    def list_call(self, *call: object) -> None:
        if self._calls is not None:
            with self._lock:
                self._list(call)

    def list_operations(self) -> list[DeviceOperation]:
        with self._lock:
            self._operations = []
            return self._operations

    def new_event(self, owner: object) -> CoreEvent:
        self.check()
        return CoreEvent()

    def new_stream(self, owner: object, *, runs_inline: bool) -> CoreStream:
        with self._lock:
            self.check()
            stream = CoreStream(self, owner, runs_inline)
            self._streams.add(stream)
            return stream

    # -- work -------------------------------------------------------------------------------------------------

    def record(self, stream: CoreStream, event: CoreEvent, *call: object) -> None:
        with self._admission(stream):
            self.check()
            self._list(call)
            event.record = self._submit(stream, Record(time.monotonic()))

    def wait(self, stream: CoreStream, event: CoreEvent, *call: object) -> None:
        record = event.record
        with self._admission(stream):
            self.check()
            self._list(call)
            if record is None or record.done:
                return
            self._submit(stream, _Wait(record))
        if stream.runs_inline:
            self.block_on(record)

    def wait_stream(self, stream: CoreStream, other: CoreStream, *call: object) -> None:
        with self._admission(stream, other):
            self.check()
            self._list(call)
            record = self._submit(other, Record(time.monotonic()))
            if record.done:
                return
            self._submit(stream, _Wait(record))
        if stream.runs_inline:
            self.block_on(record)

    def operate(self, stream: CoreStream, engine: EngineName, work: Work, duration: float, nbytes: int) -> None:
        gate = _closed_gate() if stream.runs_inline else None
        operation: _Operation | None = None
        try:
            with self._admission(stream):
                state = self._engine(engine)
                self.check()
                if state.failures:
                    raise state.failures.popleft()
                if state.bandwidth is not None:
                    duration += nbytes / state.bandwidth
                operation = _Operation(stream, state, work, duration, time.monotonic())
                if gate is not None:
                    operation.gate = gate
                    self._gates.add(gate)
                self._submit(stream, operation)
            if gate is not None:
                self._run_inline(operation, gate)
        except BaseException:
            if operation is not None and gate in self._gates:  # it has not left
                self._leave(operation, gate, 0.0)
            raise

    # -- how far it has got -----------------------------------------------------------------------------------

    def is_done(self, event: CoreEvent) -> bool:
        with self._lock:
            self.check()
            return event.record is None or event.record.done

    def time_of(self, event: CoreEvent) -> float | None:
        record = event.record
        return record.time if record is not None and record.done else None

    def length(self, stream: CoreStream) -> int:
        with self._lock:
            self.check()
            return len(stream.queue)

    def synchronize(self, event: CoreEvent, *call: object) -> None:
        with self._lock:
            self.check()
            self._list(call)
            record = event.record
        if record is not None:
            self.block_on(record)

    def drain(self, stream: CoreStream, *call: object) -> None:
        with self._lock:
            self.check()
            self._list(call)
            record = self._submit(stream, Record(time.monotonic()))
        self.block_on(record)

    def drain_all(self) -> None:
        with self._lock:
            self.check()
            records = [self._submit(stream, Record(time.monotonic())) for stream in list(self._streams)]
        for record in records:
            self.block_on(record)

    def block_on(self, record: Record) -> None:
        """Block the calling thread until `record` is done or the device is lost."""
        with self._lock:
            self.check()
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
                self.check()

    # -- control --------------------------------------------------------------------------------------------

    def hold(self, engine: EngineName) -> None:
        with self._lock:
            state = self._engine(engine)
            if not state.held:
                state.held = True
                state.allowed = state.started

    def step(self, engine: EngineName, n: int = 1) -> None:
        with self._lock:
            state = self._engine(engine)
            self.check()
            if not state.held:
                raise RuntimeError(f"step() needs a held engine: call hold({engine!r}) first")
            state.free_time = max(state.free_time, time.monotonic())
            state.allowed += n
            target = state.allowed
            self._dispatch(state)
            while state.completed < target:
                state.changed.wait()
                self.check()

    def resume(self, engine: EngineName) -> None:
        with self._lock:
            state = self._engine(engine)
            state.held = False
            state.free_time = max(state.free_time, time.monotonic())
            self._dispatch(state)

    def fail_next(self, engine: EngineName, exc: BaseException) -> None:
        with self._lock:
            self._engine(engine).failures.append(exc)

    def stop(self, exc: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = exc
            for gate in self._gates:
                _open(gate)
            for engine in self._engines.values():
                engine.ready.clear()
                engine.changed.notify_all()
                engine.stop()
            for stream in self._streams:
                stream.queue.clear()
            self._room.notify_all()

    def join(self, deadline: float | None) -> None:
        """Wait for the threads until `deadline` (`time.monotonic` seconds), for ever where that is None."""
        for engine in self._engines.values():
            if engine.thread is not threading.current_thread():
                engine.thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def stop_in_child(self, exc: BaseException) -> None:
        self._lock, self._driver_lock = threading.Lock(), threading.Lock()
        self._room = threading.Condition(self._lock)
        for engine in self._engines.values():
            engine.changed = threading.Condition(self._lock)
        self.stop(exc)

    # -- inside; the lock is held where not said otherwise ----------------------------------------------------

    def _engine(self, name: str) -> _Engine:
        for engine in self._engines.values():
            if engine.name == name:
                return engine
        raise ValueError(f"no engine named {name!r}; there are {', '.join(ENGINES)}")

    def _admission(self, *streams: CoreStream) -> AbstractContextManager[Any]:
        """The lock, held once there is room on `streams`. It is not held yet."""
        return self._lock if self._queue_depth is None else self._with_room(streams, self._queue_depth)

    @contextmanager
    def _with_room(self, streams: Sequence[CoreStream], depth: int) -> Iterator[None]:
        with self._driver_lock, self._lock:
            while self._error is None and any(len(stream.queue) >= depth for stream in streams):
                self._room.wait()
            yield

    def _list(self, call: tuple[object, ...]) -> None:
        if self._calls is not None and call:
            self._calls.append((*call, threading.current_thread().name))

    def _run_inline(self, operation: _Operation, gate: threading.Lock) -> None:
        """Wait for the engine, then run the operation on the calling thread. The lock is not held."""
        gate.acquire()
        with self._lock:
            self.check()
        self._leave(operation, gate, self._perform(operation))
        with self._lock:
            self.check()  # lost in the middle of it

    def _leave(self, operation: _Operation, gate: threading.Lock, finished: float) -> None:
        """The calling thread is done with an inline operation. The lock is not held.

        :param finished: when it ended, virtually; 0 where that was by an exception.
        """
        with self._lock:
            self._gates.discard(gate)
            if operation.engine.running is operation:
                self._complete(operation, finished or time.monotonic())
            else:  # interrupted before its turn: the engine's thread makes nothing of it when that comes
                operation.work, operation.duration, operation.gate = _nothing, 0.0, None

    def _perform(self, operation: _Operation) -> float:
        """Do the work and let its duration pass; return its virtual completion time. The lock is not held.

        The next operation starts, virtually, when this one virtually ended, so what a sleep overshoots is made
        up for by the next and pacing does not drift.
        """
        engine = operation.engine
        work = operation.work
        if isinstance(work, CopyBatch):
            work.execute()
        else:
            work()
        finished = max(operation.start_time + operation.duration, time.monotonic())
        with self._lock:
            while self._error is None and (remaining := finished - time.monotonic()) > 0:
                engine.changed.wait(remaining)
        return finished

    def _run_on_engine(self, operation: _Operation) -> None:
        """Do an operation on its engine's thread. The lock is not held."""
        try:
            finished = self._perform(operation)
        except BaseException as exc:
            self.stop(exc)
            return
        with self._lock:
            self._complete(operation, finished)

    def _submit(self, stream: CoreStream, item: _ItemT) -> _ItemT:
        if isinstance(item, Record) and not stream.queue:  # nothing to wait for, and nobody waits for it yet
            item.time = stream.time = max(item.time, stream.time)
            item.done = True
            return item
        stream.queue.append(item)
        if len(stream.queue) == 1:
            self._advance(stream)
        return item

    def _advance(self, stream: CoreStream) -> None:
        """Take from the stream's head what can be taken, and from every stream that this unblocks."""
        pending = [stream]
        while pending:
            stream = pending.pop()
            queue = stream.queue
            while queue:
                item = queue[0]
                if isinstance(item, Record):
                    item.time = stream.time = max(item.time, stream.time)
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
                    stream.time = max(stream.time, item.record.time)
                else:
                    if not item.handed_over:
                        item.handed_over = True
                        item.ready_time = max(item.ready_time, stream.time)
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
        operation.start_time = max(operation.ready_time, engine.free_time)
        engine.started += 1
        if operation.gate is not None:
            _open(operation.gate)
        else:
            engine.hints.put(None)

    def _complete(self, operation: _Operation, finished: float) -> None:
        engine, stream = operation.engine, operation.stream
        engine.running = None
        engine.free_time = max(engine.free_time, finished)  # it may have been let through since then
        engine.completed += 1
        stream.time = finished
        if self._operations is not None and self._error is None and operation.work is not _nothing:
            self._operations.append(DeviceOperation(engine.name, stream.owner(), operation.start_time, finished))
        if self._error is None:
            stream.queue.popleft()
            if self._queue_depth is not None:
                self._room.notify_all()
            self._advance(stream)
            self._dispatch(engine)
        engine.changed.notify_all()


def _nothing() -> None:
    return None
