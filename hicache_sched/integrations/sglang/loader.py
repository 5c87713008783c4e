"""What a controller's load-back is while it is asynchronous."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from hicache_sched import LoadFailedError, SchedulerConfig, TransferScheduler
from hicache_sched.integrations.sglang.announce import announce
from hicache_sched.integrations.sglang.backend import EngineBackend, PlanningBackend, load_op
from hicache_sched.integrations.sglang.late import HandedOut, LateAck, LateLayerEvent, Slot
from hicache_sched.integrations.sglang.plans import NoPlans, plans_for

FailurePolicy = Literal["raise", "serve"]


@dataclass
class _Loading:
    """A hand-out that is not through yet.

    Attributes:
        operations: of the burst, in order.
        is_loaded: whether the scheduler has been given all of them.
        slot: of the burst, once it is handed out.
        ack: what was published.
    """

    burst: HandedOut
    operations: list[Any] = field(default_factory=list)
    is_loaded: bool = False
    slot: int | None = None
    ack: LateAck | None = None


class AsyncLoader:
    """Hands a controller's load queue out in `start_loading`'s place; on SGLang's scheduler thread.

    The counter, its slots and their lists of events stay the objects they are, as much of SGLang holds them; the events
    in the lists are late ones until `close`.

    Attributes:
        scheduler: what makes the transfers.
    """

    def __init__(self, controller: Any, runtime: Any, on_failure: FailurePolicy) -> None:
        """
        :param controller: a `HiCacheController`, complete.
        :param runtime: the device module that it uses.
        :raises HiCacheSchedError: its scheduler cannot be started.
        """
        self._controller = controller
        self._runtime = runtime
        self._policy = on_failure
        self._failure: LoadFailedError | None = None
        self._outstanding: deque[HandedOut] = deque()
        self._loading: _Loading | None = None
        self._next_slot = 0
        counter = controller.layer_done_counter
        plans = plans_for(controller)
        if isinstance(plans, NoPlans):
            announce("info", f"SGLang's transfer engine makes the copies: {plans.reason}")
            backend = EngineBackend(controller)
        else:
            announce("info", "copies are planned")
            backend = PlanningBackend(controller, plans)
        self.scheduler = TransferScheduler(
            backend,
            runtime=runtime,
            config=SchedulerConfig(num_slots=counter.num_counters, poll_acks=False, thread_name="hicache-sched"),
            h2d_stream=controller.l2_transfer_engine.host_to_device_stream,
        )
        self.scheduler.start()
        self._slots = [Slot() for _ in counter.events]
        self._real_events = [slot.load_events for slot in counter.events]
        for slot, events in zip(self._slots, counter.events, strict=True):
            events.load_events = [LateLayerEvent(slot, layer) for layer in range(counter.num_layers)]

    def start_loading(self) -> int:
        """Hand out what the controller has queued; blocks while no slot is free.

        Interrupted anywhere it can be called again, and goes on where it was.

        :return: the slot; -1 where nothing is queued.
        :raises LoadFailedError: an earlier burst has failed, unless that is to be served.
        """
        self._forget_ended()
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # or the same error's traceback grows each time
        queue = self._controller.load_queue
        if self._loading is None:
            if not queue:
                return -1
            self._loading = _Loading(HandedOut(self._runtime, self._on_failure))
        loading = self._loading
        if (slot := loading.slot) is None:
            slot = self._hand_out(loading, queue)
        self._publish(loading, slot)
        if queue and queue[0] is loading.operations[0]:
            del queue[: len(loading.operations)]
        self._loading = None
        return slot

    def drain(self) -> None:
        """Block until every burst that was handed out has ended; who looks at one that failed is told then."""
        for burst in self._outstanding:
            burst.join()

    def reset(self) -> None:
        """Drain, for an engine that then forgets all that was loaded, and so what failed."""
        self.drain()
        self.scheduler.reset()  # what was loaded for a hand-out that was interrupted
        self._loading = self._failure = None
        self._outstanding.clear()
        for slot in self._slots:
            slot.burst = None
        self._next_slot = 0

    def close(self) -> None:
        """Drain and join; the controller loads as it is from now on."""
        self.scheduler.close()
        for events, real in zip(self._controller.layer_done_counter.events, self._real_events, strict=True):
            events.load_events = real

    def _hand_out(self, loading: _Loading, queue: list[Any]) -> int:
        """Hand out the operations in `queue`; some may have been loaded before, or all handed out."""
        num_loaded = self.scheduler.stats().queued_ops
        handle = None
        if loading.is_loaded and num_loaded == 0:
            handle = self.scheduler.handle_for(self._next_slot)
        else:
            loading.operations = list(queue)
            for operation in queue[num_loaded:]:
                self.scheduler.load(load_op(operation, loading.burst))
            loading.is_loaded = True
            self.scheduler.fence_stream = self._controller.load_fence_stream
            handle = self.scheduler.start_loading_sync()
        assert handle is not None, "something is queued"
        loading.burst.handle = handle
        loading.slot = slot = handle.slot
        return slot

    def _publish(self, loading: _Loading, slot: int) -> None:
        """Show a burst to whoever must not believe that it is done, or does not exist; does nothing twice."""
        controller, burst = self._controller, loading.burst
        self._next_slot = (slot + 1) % len(self._slots)
        self._slots[slot].burst = burst
        controller.layer_done_counter.producer_index = slot
        if burst not in self._outstanding:
            self._outstanding.append(burst)
        if loading.ack is None:
            loading.ack = LateAck(burst, [node for operation in loading.operations for node in operation.node_ids])
        if loading.ack not in controller.ack_load_queue:
            controller.ack_load_queue.append(loading.ack)
        finish = loading.ack.finish_event
        controller.mem_pool_device_allocator.set_hicache_transfer_done_event((id(controller), "load"), finish)

    def _forget_ended(self) -> None:
        """Look how the bursts have ended, those that nobody has asked after included."""
        while self._outstanding and self._outstanding[0].handle.done():
            error = self._outstanding.popleft().handle.exception()
            if error is not None and self._policy == "raise":
                self._failure = self._failure or error

    def _on_failure(self, error: LoadFailedError) -> None:
        if self._policy == "raise":
            self._failure = self._failure or error
            raise error.with_traceback(None)
