"""`EmulatedCore` with its streams and engines in C++: copies, and what waits for them, do not need the GIL."""

from __future__ import annotations

import threading
import time
import weakref
from collections import UserList
from collections.abc import Callable, MutableSequence
from typing import Any

from hicache_sched import native
from hicache_sched.device.copy_batch import CopyBatch
from hicache_sched.device.emulated_core import ENGINES, DeviceOperation, EngineName, Work


class NativeStream:
    """The queue behind a stream.

    Attributes:
        core: the core that it belongs to, kept alive.
        handle: the native stream.
        runs_inline: whether its operations are done by the thread that submits them.
    """

    __slots__ = ("__weakref__", "core", "handle", "runs_inline")

    def __init__(self, core: NativeCore, handle: Any, runs_inline: bool) -> None:
        self.core = core
        self.handle = handle
        self.runs_inline = runs_inline


class NativeCore:
    """See `EmulatedCore`, whose interface this has. Events and recordings are opaque.

    An engine has two threads: a native one for copies, and one of Python for what is a Python function.
    """

    def __init__(self, bandwidths: dict[EngineName, float | None], queue_depth: int | None) -> None:
        speeds = tuple(bandwidths[name] or 0.0 for name in ENGINES)
        self._native = native.module.Core(speeds, queue_depth or 0)
        self._error: BaseException | None = None
        self._calls: TracedList | None = None
        self._operations: TracedList | None = None
        self._owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._list_lock = threading.RLock()  # a payload that goes may make calls, too
        self._may_block = queue_depth is not None
        calls = self._native.calls()
        self._threads = [
            threading.Thread(
                target=_make_calls, args=(calls, number, weakref.ref(self)), name=f"emulated-device-{name}", daemon=True
            )
            for number, name in enumerate(ENGINES)
        ]
        for thread in self._threads:
            thread.start()
        # Native threads would be joined by the garbage collector; this ends them before.
        weakref.finalize(self, self._native.stop).atexit = False

    def check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)

    def list_calls(self) -> MutableSequence[Any]:
        with self._list_lock:
            if self._calls is not None:
                self._calls.end()
            self._native.trace_calls()
            self._calls = TracedList(self._list_lock, self._take_traced)
            return self._calls

    def list_call(self, *call: object) -> None:
        if self._calls is not None:
            with self._list_lock:
                self._list(call)

    def list_operations(self) -> MutableSequence[DeviceOperation]:
        with self._list_lock:
            if self._operations is not None:
                self._operations.end()
            self._native.trace_operations()
            self._operations = TracedList(self._list_lock, self._take_operations)
            return self._operations

    def new_stream(self, owner: object, *, runs_inline: bool) -> NativeStream:
        self.check()
        handle = self._native.new_stream(runs_inline)
        self._owners[native.module.id_of(handle)] = owner
        return NativeStream(self, handle, runs_inline)

    def new_event(self, owner: object) -> Any:
        self.check()
        event = self._native.new_event()
        self._owners[native.module.id_of(event)] = owner
        return event

    # -- work -------------------------------------------------------------------------------------------------

    def record(self, stream: NativeStream, event: Any, *call: object) -> None:
        self.check()
        self._there(self._listed(call, self._native.record, stream.handle, event))

    def wait(self, stream: NativeStream, event: Any, *call: object) -> None:
        self.check()
        record = self._native.latest(event)
        if record is None or self._native.is_done(record):
            self._listed(call, _nothing)
            return
        self._there(self._listed(call, self._native.wait, stream.handle, record))
        if stream.runs_inline:
            self.block_on(record)

    def wait_stream(self, stream: NativeStream, other: NativeStream, *call: object) -> None:
        event = self._native.new_event()
        self.record(other, event, *call)
        self.wait(stream, event)

    def operate(self, stream: NativeStream, engine: EngineName, work: Work, duration: float, nbytes: int) -> None:
        number = _number(engine)
        self.check()
        is_call = not isinstance(work, CopyBatch)
        operation: Any = None
        try:
            operation = self._native.submit(stream.handle, number, work, is_call, duration, nbytes)
            self._there(operation)
            if stream.runs_inline:
                self._run_inline(operation, work)
        except BaseException:
            # One that goes is abandoned, but whoever keeps the exception keeps this frame.
            if operation is not None and stream.runs_inline:
                self._native.abandon(operation)
            raise

    def plane_device(self, h2d: NativeStream, index: NativeStream, names: tuple[str, str]) -> Any:
        """The device, as a native data plane calls it."""
        return self._native.plane_device(h2d.handle, index.handle, *names)

    # -- how far it has got -----------------------------------------------------------------------------------

    def is_done(self, event: Any) -> bool:
        self.check()
        record = self._native.latest(event)
        return record is None or self._native.is_done(record)

    def time_of(self, event: Any) -> float | None:
        record = self._native.latest(event)
        time_of: float | None = None if record is None else self._native.time_of(record)
        return time_of

    def length(self, stream: NativeStream) -> int:
        self.check()
        length: int = self._native.length(stream.handle)
        return length

    def synchronize(self, event: Any, *call: object) -> None:
        self.check()
        self._listed(call, _nothing)
        record = self._native.latest(event)
        if record is not None:
            self.block_on(record)

    def drain(self, stream: NativeStream, *call: object) -> None:
        self.check()
        self.block_on(self._there(self._listed(call, self._native.record_at_once, stream.handle)))

    def drain_all(self) -> None:
        self.check()
        for record in self._native.record_all():
            self.block_on(record)

    def block_on(self, record: Any) -> None:
        """Block the calling thread until `record` is done or the device is lost."""
        self.check()
        self._there(self._native.block_on(record))

    # -- control ----------------------------------------------------------------------------------------------

    def hold(self, engine: EngineName) -> None:
        self._native.hold(_number(engine))

    def step(self, engine: EngineName, n: int = 1) -> None:
        number = _number(engine)
        self.check()
        if not self._native.is_held(number):
            raise RuntimeError(f"step() needs a held engine: call hold({engine!r}) first")
        self._there(self._native.step(number, n))

    def resume(self, engine: EngineName) -> None:
        self._native.resume(_number(engine))

    def fail_next(self, engine: EngineName, exc: BaseException) -> None:
        self._native.fail_next(_number(engine), exc)

    def stop(self, exc: BaseException) -> None:
        if self._error is None:
            self._error = exc
        self._native.stop()

    def join(self, deadline: float | None) -> None:
        """Wait for the threads until `deadline` (`time.monotonic` seconds), for ever where that is None. The native
        ones end after the copy that they are in the middle of."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        self._native.join()

    def stop_in_child(self, exc: BaseException) -> None:
        self._list_lock = threading.RLock()
        self._native.forget_threads()
        self.stop(exc)

    # -- inside -----------------------------------------------------------------------------------------------

    def _there(self, result: Any) -> Any:
        """What a native call gave, unless the device was lost."""
        if not result:
            self.check()
        return result

    def _listed(self, call: tuple[object, ...], function: Any, *args: Any) -> Any:
        if self._calls is None or not call:
            return function(*args)
        with self._list_lock:
            self._list(call)
            if not self._may_block:  # so that calls are made in the order in which they are listed
                return function(*args)
        return function(*args)

    def _list(self, call: tuple[object, ...]) -> None:
        if self._calls is not None:
            self._calls.append((*call, threading.current_thread().name))  # behind the traced ones, which it takes first

    def _take_traced(self) -> list[Any]:
        """Calls that were made without Python since the last time."""
        return [
            (name, self._owners.get(event or stream), self._owners.get(stream), thread)
            for name, event, stream, thread in self._native.take_traced()
        ]

    def _take_operations(self) -> list[DeviceOperation]:
        """What the engines have done since the last time."""
        return [
            DeviceOperation(ENGINES[number], self._owners.get(stream), begin, end)
            for number, stream, begin, end in self._native.take_operations()
        ]

    def _run_inline(self, operation: Any, work: Work) -> None:
        """Wait for the engine, then run the operation on the calling thread."""
        self._there(self._native.await_turn(operation))
        if isinstance(work, CopyBatch):
            work.execute()
        else:
            work()
        self._native.complete(operation)
        self.check()  # lost in the middle of it


class TracedList(UserList[Any]):
    """What happened, in order; what happened without Python is fetched when somebody looks.

    :param lock: held while that is fetched.
    :param take_traced: gives what happened without Python since the last time.
    """

    def __init__(self, lock: threading.RLock, take_traced: Callable[[], list[Any]]) -> None:
        self._lock = lock
        self._take_traced = take_traced
        self._listed: list[Any] = []

    def end(self) -> None:
        """List nothing from now on: what follows is another list's. The lock is held."""
        self._listed.extend(self._take_traced())
        self._take_traced = list

    @property
    def data(self) -> list[Any]:  # type: ignore[override] # an attribute of UserList's, through which it does everything
        with self._lock:
            self._listed.extend(self._take_traced())
        return self._listed

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]


def _make_calls(calls: Any, number: int, core: weakref.ref[NativeCore]) -> None:
    """On a thread of its own: do what an engine gets of Python functions."""
    while (call := native.module.next_call(calls, number)) is not None:
        operation, function = call
        try:
            function()
        except BaseException as exc:
            if (owner := core()) is not None:
                owner.stop(exc)
            del owner
        native.module.complete_call(calls, operation)
        del call, operation, function  # a parked thread keeps nothing alive


def _number(engine: str) -> int:
    if engine not in ENGINES:
        raise ValueError(f"no engine named {engine!r}; there are {', '.join(ENGINES)}")
    return ENGINES.index(engine)


def _nothing() -> None:
    return None
