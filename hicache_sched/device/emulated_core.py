"""What an emulated device does: streams, recordings, waits and engines, without the interface of a runtime.

There are two: one in C++, and one in Python for where that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias

from hicache_sched.device.copy_batch import CopyBatch

EngineName = Literal["compute", "h2d", "d2h"]
ENGINES: Final[tuple[EngineName, ...]] = ("compute", "h2d", "d2h")

Work: TypeAlias = Callable[[], Any] | CopyBatch
"""What an operation does. Copies are plain arrays."""


@dataclass(frozen=True)
class DeviceOperation:
    """What an engine did.

    Times are virtual ones, in `time.monotonic` seconds: those at which the device says that it ran, and from which
    events have theirs. An operation begins when what it waits for is done and its engine free, however long it then
    takes until a thread does it, and ends when its duration is over, however late the thread that paces it wakes up.

    Attributes:
        engine: which one it occupied.
        stream: which one it was put on; None where that was collected before somebody looked.
        begin: when it began.
        end: when it ended.
    """

    engine: EngineName
    stream: Any
    begin: float
    end: float


class EmulatedCore(Protocol):
    """The streams and engines of an emulated device, with threads of its own.

    Streams are FIFO queues; work of different streams is concurrent; each engine (compute, h2d, d2h) does one operation
    at a time. An event's recording marks a place in a stream; waits hold the recording, so a later one does not move
    them.

    Every method may be called on any thread. What makes a call of the runtime's also takes what to list it as: its
    name, the object it was made on, the stream concerned. Once the core was stopped, every method but `time_of` and
    those under "control" raises what it was stopped with, where a thread was blocked in it, too.
    """

    def check(self) -> None:
        """
        :raises BaseException: what the core was stopped with.
        """

    def list_calls(self) -> MutableSequence[Any]:
        """From now on, list the calls that are made, each with the calling thread's name behind it."""

    def list_call(self, *call: object) -> None:
        """List a call that changes nothing here, if calls are listed."""

    def list_operations(self) -> MutableSequence[DeviceOperation]:
        """From now on, list the operations that are completed. One that was interrupted before its turn does nothing,
        and is not listed; nor is one that the end of the core cuts short."""

    def new_stream(self, owner: object, *, runs_inline: bool) -> Any:
        """
        :param owner: what the stream is listed as in calls and operations; not kept alive.
        :param runs_inline: whether its operations are done by the thread that submits them.
        """

    def new_event(self, owner: object) -> Any:
        """
        :param owner: what the event is listed as in calls; not kept alive.
        """

    # -- work -------------------------------------------------------------------------------------------------

    def record(self, stream: Any, event: Any, *call: object) -> None:
        """Record an event on a stream."""

    def wait(self, stream: Any, event: Any, *call: object) -> None:
        """Make a stream wait for an event's recording, if there is one; where it runs inline, the calling thread."""

    def wait_stream(self, stream: Any, other: Any, *call: object) -> None:
        """Make a stream wait for what another has got so far; where it runs inline, the calling thread."""

    def operate(self, stream: Any, engine: EngineName, work: Work, duration: float, nbytes: int) -> None:
        """Put an operation on a stream and, where that runs inline, do it.

        :param duration: seconds it takes at least.
        :param nbytes: bytes moved, paced by the engine's bandwidth on top of `duration`.
        """

    # -- how far it has got -----------------------------------------------------------------------------------

    def is_done(self, event: Any) -> bool:
        """Whether an event's recording has been reached; True where there is none."""

    def time_of(self, event: Any) -> float | None:
        """When an event's recording was reached, in virtual time (`time.monotonic` seconds); None if it was not."""

    def length(self, stream: Any) -> int:
        """What a stream still has to do: operations, recordings and waits."""

    def synchronize(self, event: Any, *call: object) -> None:
        """Block the calling thread until an event's recording, if there is one, has been reached."""

    def drain(self, stream: Any, *call: object) -> None:
        """Block the calling thread until a stream has done what it was given so far."""

    def drain_all(self) -> None:
        """The same for every stream."""

    # -- control ----------------------------------------------------------------------------------------------

    def hold(self, engine: EngineName) -> None:
        """Let no further operation of `engine` start; one that is running finishes."""

    def step(self, engine: EngineName, n: int = 1) -> None:
        """Let the next `n` operations of a held engine through and return when they are done."""

    def resume(self, engine: EngineName) -> None:
        """Undo `hold`."""

    def fail_next(self, engine: EngineName, exc: BaseException) -> None:
        """Make the next operation for `engine` raise `exc` when it is submitted; called twice, the next two."""

    def stop(self, exc: BaseException) -> None:
        """Drop what is queued, end the threads, and make every call raise `exc`."""

    def join(self, deadline: float | None) -> None:
        """Wait for the threads until `deadline` (`time.monotonic` seconds), for ever where that is None."""

    def stop_in_child(self, exc: BaseException) -> None:
        """In a forked child, which has copies of the locks, in whatever state they were, and none of the threads."""
