"""What a controller's load-back is while it is asynchronous."""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

from hicache_sched import LoadFailedError, SchedulerConfig, TransferScheduler
from hicache_sched.integrations.sglang.announce import announce
from hicache_sched.integrations.sglang.backend import EngineBackend, PlanningBackend, load_op
from hicache_sched.integrations.sglang.late import HandedOut, LateAck, LateLayerEvent, Slot
from hicache_sched.integrations.sglang.plans import NoPlans, plans_for

FailurePolicy = Literal["raise", "serve"]


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
        self._loading: HandedOut | None = None  # not handed out yet
        self._num_loaded = 0  # operations of it
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

        :return: the slot; -1 where nothing is queued.
        :raises LoadFailedError: an earlier burst has failed, unless that is to be served.
        """
        self._forget_ended()
        if self._failure is not None:
            raise self._failure
        controller = self._controller
        queue = controller.load_queue
        if not queue:
            return -1
        burst = self._loading = self._loading or HandedOut(self._runtime, self._on_failure)
        for operation in queue[self._num_loaded :]:  # some are loaded where a hand-out was interrupted
            self.scheduler.load(load_op(operation, burst))
            self._num_loaded += 1
        self.scheduler.fence_stream = controller.load_fence_stream
        handle = self.scheduler.start_loading_sync()
        assert handle is not None, "something is queued"
        burst.handle = handle
        self._loading, self._num_loaded = None, 0
        self._outstanding.append(burst)
        self._publish(burst, [node for operation in queue for node in operation.node_ids])
        queue.clear()
        return handle.slot

    def drain(self) -> None:
        """Block until every burst that was handed out has ended; who looks at one that failed is told then."""
        for burst in self._outstanding:
            burst.join()

    def reset(self) -> None:
        """Drain, for an engine that then forgets all that was loaded, and so what failed."""
        self.drain()
        self._outstanding.clear()
        self._failure = None

    def close(self) -> None:
        """Drain and join; the controller loads as it is from now on."""
        self.scheduler.close()
        for events, real in zip(self._controller.layer_done_counter.events, self._real_events, strict=True):
            events.load_events = real

    def _publish(self, burst: HandedOut, node_ids: list[int]) -> None:
        """Show the burst to whoever must not believe that it is done, or does not exist."""
        controller, slot = self._controller, burst.handle.slot
        self._slots[slot].burst = burst
        controller.layer_done_counter.producer_index = slot
        ack = LateAck(burst, node_ids)
        controller.ack_load_queue.append(ack)
        controller.mem_pool_device_allocator.set_hicache_transfer_done_event((id(controller), "load"), ack.finish_event)

    def _forget_ended(self) -> None:
        """Look how the bursts have ended, those that nobody has asked after included."""
        while self._outstanding and self._outstanding[0].handle.done():
            error = self._outstanding.popleft().handle.exception()
            if error is not None and self._policy == "raise":
                self._failure = self._failure or error

    def _on_failure(self, error: LoadFailedError) -> None:
        if self._policy == "raise":
            self._failure = self._failure or error
            raise error
