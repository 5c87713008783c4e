"""How copies are made: the protocol between the scheduler and the pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hicache_sched.copy.plan import CopyPlan
from hicache_sched.load_op import LoadOp

if TYPE_CHECKING:
    from hicache_sched.device.binding import DeviceBinding


class TransferPoint(Protocol):
    """What `BurstBackend.bind` is given: the scheduler, as far as a backend needs it.

    Attributes:
        device: the device that the scheduler is bound to, its runtime at `device.runtime`.
        runtime: the device API in use.
        h2d_stream: the stream that layers are submitted on.
        index_stream: the stream that device indices are read on in async mode.
    """

    @property
    def device(self) -> DeviceBinding: ...
    @property
    def runtime(self) -> Any: ...
    @property
    def h2d_stream(self) -> Any: ...
    @property
    def index_stream(self) -> Any: ...


class BurstBackend(Protocol):
    """Makes a burst's copies; an engine brings its own to move pools of its own.

    `bind`, `prepare` and `enqueue_layer` are called on the data plane's thread (the caller's thread in inline
    mode; `bind` on the thread that starts the scheduler), `finish` on the landing observer's. Whatever they
    raise fails the burst and nothing else.

    Three attributes more are looked for and need not be there: `num_bytes` of what `prepare` returns goes into the ack;
    `ops_per_layer` (1), how many operations `enqueue_layer` puts on the stream, bounds how many layers are in flight;
    `copy_method`, how copies are made, goes into the log line `scheduler_started`.

    Attributes:
        num_layers: transfer layers of a burst.
        pool_names: the anchor's name first, then the side pools'.
    """

    @property
    def num_layers(self) -> int: ...
    @property
    def pool_names(self) -> Sequence[str]: ...

    def bind(self, scheduler: TransferPoint) -> None:
        """Learn the scheduler's runtime and streams; called once, at start."""

    def prepare(self, ops: Sequence[LoadOp]) -> Any:
        """Merge a burst's load ops, read and check their indices; may block.

        The index stream is current and behind the start event (in inline mode: the caller's stream).

        Raises:
            InvalidLoadError: an index is out of range, a destination is named twice, or a run is not
                page-aligned in a paged pool.
        """

    def enqueue_layer(self, prepared: Any, layer: int) -> None:
        """Submit one layer of every pool; the h2d stream is current and behind start and fence events."""

    def finish(self, prepared: Any) -> None:
        """Release what `prepare` made; called once, after what was submitted has landed."""


@runtime_checkable
class SubmitsBursts(BurstBackend, Protocol):
    """A backend whose engine submits all layers of a burst in one call of its own; it is called in place of
    `enqueue_layer`, which need not work."""

    def submit_burst(self, prepared: Any, on_layer_done: Callable[[int], None]) -> None:
        """Submit every layer in order; the h2d stream is current and behind start and fence events.

        :param on_layer_done: to be called with each layer as soon as its copies have been submitted, on the same
            thread; it records the layer's event behind what is on the h2d stream, and blocks while that is full. What
            it raises ends the submission and has to get out of this method.
        """


@runtime_checkable
class PlansBursts(BurstBackend, Protocol):
    """A backend that can say what a burst copies instead of copying it.

    Where the device makes copies in batches, `plan` is called in place of `prepare`, on the same thread and with the
    same stream current, and the scheduler makes the plan's copies itself. `finish` then gets the plan.
    """

    def plan(self, ops: Sequence[LoadOp]) -> CopyPlan | None:
        """Merge a burst's load ops, read and check their indices, and say what to copy; may block.

        A plan that is refused fails the burst, and `finish` does not get it.

        :return: the plan, or None for a burst to go through `prepare` and `enqueue_layer`.
        :raises InvalidLoadError: as `prepare` does.
        """
