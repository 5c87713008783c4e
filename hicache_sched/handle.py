"""Load handles: what a hand-out gives, to await, to wait on and to ask."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator
from functools import partial
from typing import Any

from hicache_sched.ack import LoadAck
from hicache_sched.burst import Burst
from hicache_sched.delivery import Delivery
from hicache_sched.device.binding import DeviceBinding, runs_inline
from hicache_sched.errors import HiCacheSchedError, LoadCancelledError, LoadFailedError
from hicache_sched.event_set import EventSetPool
from hicache_sched.waiting import ForkGuard, check_timeout


class LoadHandle:
    """One burst, seen from the engine.

    Everything may be called from any thread and awaited on any event loop, by any number of waiters at once. A task
    that is cancelled while it awaits takes nothing with it: the transfer goes on. A handle names its burst for ever:
    it never waits for, or is satisfied by, a later burst in the same slot.
    """

    __slots__ = ("_burst", "_device", "_event_sets", "_guard", "_observe")

    def __init__(
        self,
        burst: Burst,
        device: DeviceBinding,
        event_sets: EventSetPool,
        guard: ForkGuard,
        observe: Callable[[], None],
    ) -> None:
        self._burst = burst
        self._device = device
        self._event_sets = event_sets
        self._guard = guard
        self._observe = observe

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoadHandle) and self._burst is other._burst

    def __hash__(self) -> int:
        return hash(self._burst)

    def __repr__(self) -> str:
        burst = self._burst
        state = burst.ack.status.value if burst.ack else f"{burst.enqueued} enqueued, {burst.landed} landed"
        return (
            f"<LoadHandle burst {burst.id} in slot {burst.slot} generation {burst.generation}: "
            f"{state} of {burst.num_layers} layers>"
        )

    @property
    def slot(self) -> int:
        """The slot it was handed out in: the index that engines carry."""
        return self._burst.slot

    @property
    def generation(self) -> int:
        """How many times the slot had been handed out, this one included."""
        return self._burst.generation

    @property
    def burst_id(self) -> int:
        """Number of the burst in this scheduler, from 1."""
        return self._burst.id

    @property
    def node_ids(self) -> tuple[int, ...]:
        """Nodes of the burst's load ops, in the order they were loaded."""
        return tuple(self._burst.queue.node_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens to load through the anchor pool."""
        return next(iter(self._burst.queue.tokens_by_pool.values()))

    @property
    def num_layers(self) -> int:
        """Transfer layers."""
        return self._burst.num_layers

    @property
    def stale(self) -> bool:
        """True for a failed or cancelled burst: its device pages must not be trusted.

        Final once `result` has returned or raised; look before tokens or prefixes computed from the pages are
        published.
        """
        self._observe()
        return self._burst.stale

    # -- the whole burst --------------------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, LoadAck]:
        """Await the ack.

        :raises LoadFailedError: the burst failed; raised when what was submitted of it has landed.
        :raises LoadCancelledError: it was cancelled.
        """
        burst = self._burst
        return self._outcome((yield from burst.waits.wait(burst.look_ended, None, f"burst {burst.id}").__await__()))

    def result(self, timeout: float | None = None) -> LoadAck:
        """Block the calling thread until the burst has ended and return its ack.

        :param timeout: seconds to wait at most, None for no limit.
        :raises LoadFailedError: the burst failed; raised when what was submitted of it has landed.
        :raises LoadCancelledError: it was cancelled.
        :raises TransferTimeoutError: `timeout` ran out.
        """
        check_timeout(timeout)
        burst = self._burst
        return self._outcome(burst.waits.block(burst.look_ended, timeout, f"burst {burst.id}"))

    def done(self) -> bool:
        """Whether `result` would return or raise at once; so for a cancelled burst before its ack is there."""
        self._observe()
        return self._burst.ended or self._burst.cancelled

    def exception(self) -> LoadFailedError | None:
        """Why the burst failed; None if it did not, or has not ended. Never blocks."""
        self._observe()
        return self._burst.ack.error if self._burst.ack else None

    def add_done_callback(self, fn: Callable[[LoadHandle], object]) -> None:
        """Call `fn(handle)` when the burst has ended: on the loop thread (inline: on the thread that observes it).

        Where that is past, it is called here and now. If it raises, that is logged and changes nothing.
        """
        self._guard.check()
        callback = partial(fn, self)
        if not self._burst.add_callback(callback):
            Delivery.call("done_callback_failed", self._burst, callback)

    def cancel(self) -> bool:
        """Give the burst up, if the data plane has not begun it; it is then stale.

        Waiters are released at once; the ack, with status cancelled, comes in its turn.

        :return: whether it is cancelled.
        """
        self._guard.check()
        return self._burst.cancel()

    # -- single layers ----------------------------------------------------------------------------------------------

    async def enqueued(self, layer: int) -> None:
        """Await that `layer` has been submitted to the h2d stream and its event recorded.

        :raises LoadFailedError: the burst failed before that.
        :raises LoadCancelledError: it was cancelled.
        """
        self._check_layer(layer)
        burst = self._burst
        if burst.enqueued > layer:
            return
        look = partial(burst.look_enqueued, layer)
        if not await burst.waits.wait(look, None, f"layer {layer} of burst {burst.id} to be enqueued"):
            raise self._failure()

    async def layer(self, layer: int) -> None:
        """Await that `layer` has landed: its event has completed on the device.

        :raises LoadFailedError: the burst failed and the layer will not land. One that was submitted before the
            failure does land.
        :raises LoadCancelledError: the burst was cancelled.
        """
        self._check_layer(layer)
        burst = self._burst
        if burst.landed > layer:
            return
        look = partial(burst.look_landed, layer)
        if not await burst.waits.wait(look, None, f"layer {layer} of burst {burst.id} to land"):
            raise self._failure()

    async def layers(self) -> AsyncIterator[int]:
        """Layers in order, as they land; raises as `layer` does."""
        for layer in range(self._burst.num_layers):
            await self.layer(layer)
            yield layer

    def layer_enqueued(self, layer: int) -> bool:
        """Whether `layer` has been submitted and its event recorded."""
        self._check_layer(layer)
        return self._burst.enqueued > layer

    def layer_landed(self, layer: int) -> bool:
        """Whether `layer` is known to have landed.

        Where nobody waits for the layer, a native data plane may notice that up to 2 ms late, so as not to take a core
        from the engine for each layer.
        """
        self._check_layer(layer)
        self._observe()
        return self._burst.landed > layer

    def wait_layer(self, layer: int, timeout: float | None = None) -> None:
        """Order the calling thread's current stream behind `layer`; for the thread that launches the forward.

        Waits for the layer to be enqueued first, as waiting on an event that was not recorded yet is a no-op on CUDA
        (`cudaStreamWaitEvent`). Where the current stream runs inline, as a plain CPU thread's does, being ordered
        behind the layer means blocking until it has landed.

        Returns at once if the layer has landed, and also where it never will because the burst failed or was
        cancelled: a forward under way cannot be interrupted, so look at `stale` before its results are used.

        :param timeout: seconds to block at most, None for no limit.
        :raises TransferTimeoutError: `timeout` ran out; the stream is as it was.
        :raises HiCacheSchedError: the current stream is being captured into a graph.
        """
        self._check_layer(layer)
        check_timeout(timeout)
        burst = self._burst
        if burst.landed > layer:
            return
        self._guard.check()
        if self._device.is_capturing():
            raise HiCacheSchedError(
                f"wait_layer({layer}) on a stream that is being captured: the wait would belong to the graph and "
                "not to this burst; wait before the capture or replay starts"
            )
        if not burst.hold_events():
            return
        try:
            stream = self._device.current_stream()
            if runs_inline(stream):
                look, waiter = partial(burst.look_landed, layer), burst.thread_waiter(("landed", layer))
                burst.waits.block(look, timeout, f"layer {layer} of burst {burst.id} to land", waiter)
                return
            look, waiter = partial(burst.look_enqueued, layer), burst.thread_waiter(("enqueued", layer))
            what = f"layer {layer} of burst {burst.id} to be enqueued"
            if burst.enqueued > layer or burst.waits.block(look, timeout, what, waiter):
                events = burst.events
                assert events is not None, "a held burst keeps its events"
                events.layers[layer].wait(stream)
        except Exception as exc:
            if not burst.stale or isinstance(exc, HiCacheSchedError):
                raise  # the stream is not ordered behind the layer, and nothing else says so
        finally:
            if (events_back := burst.drop_events()) is not None:
                self._event_sets.give_back(events_back)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _check_layer(self, layer: int) -> None:
        if type(layer) is not int:
            raise TypeError(f"layer must be an int, not {layer!r}")
        if not 0 <= layer < self._burst.num_layers:
            raise IndexError(f"layer {layer} is out of range: the burst has layers 0 to {self._burst.num_layers - 1}")

    def _outcome(self, ack: LoadAck | None) -> LoadAck:
        if self._burst.stale:
            raise self._failure()
        assert ack is not None
        return ack

    def _failure(self) -> LoadFailedError | LoadCancelledError:
        failure = self._burst.failure()
        assert failure is not None, "only a failed or cancelled burst leaves a layer out"
        return failure
