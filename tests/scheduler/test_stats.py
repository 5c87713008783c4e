"""What can be seen of a scheduler: stats, idle, and acks, each given once and in order."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from hicache_sched import AckStatus, LoadFailedError, SchedulerStats
from hicache_sched.device import EmulatedDevice
from hicache_sched.protocol import ACK_BACKLOG
from tests.builders import LaunchingBackend, MakeScheduler, hand_out, load_op

TIMEOUT = 30.0
MODES = pytest.mark.parametrize("mode", ["async", "inline"])

NOTHING = SchedulerStats(
    mode="async",
    plane="python",
    queued_ops=0,
    bursts_queued=0,
    bursts_in_flight=0,
    free_slots=3,
    acks_unpopped=0,
    landed_bursts=0,
    failed_bursts=0,
    cancelled_bursts=0,
    loaded_tokens=0,
    loaded_bytes=0,
)


# -- stats --------------------------------------------------------------------------------------------------------


@MODES
def test_fresh_stats_say_the_mode_the_plane_and_that_nothing_happened(
    make_scheduler: MakeScheduler, mode: str, plane: str
) -> None:
    plane = plane if mode == "async" else "inline"
    assert make_scheduler(mode=mode).stats() == dataclasses.replace(NOTHING, mode=mode, plane=plane)


def test_stats_before_start_have_no_slots_and_no_plane_yet(make_scheduler: MakeScheduler) -> None:
    assert make_scheduler(start=False).stats() == dataclasses.replace(NOTHING, free_slots=0, plane="none")


def test_a_closed_scheduler_says_that_it_works_inline(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    scheduler.close(TIMEOUT)
    assert scheduler.stats() == dataclasses.replace(NOTHING, mode="inline", plane="inline")


def test_stats_count_ops_and_bursts_where_they_are(
    device: EmulatedDevice, make_scheduler: MakeScheduler, plane: str
) -> None:
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend)
    backend.gate.clear()
    hand_out(scheduler, 1)
    assert backend.preparing.wait(TIMEOUT)
    hand_out(scheduler, 2)
    scheduler.load(load_op(3))
    scheduler.load(load_op(4))

    assert scheduler.stats() == dataclasses.replace(
        NOTHING, plane=plane, queued_ops=2, bursts_queued=1, bursts_in_flight=1, free_slots=1
    )


@MODES
def test_stats_add_up_what_ended(device: EmulatedDevice, make_scheduler: MakeScheduler, mode: str) -> None:
    backend = SizedBackend(device)
    scheduler = make_scheduler(backend, mode=mode)
    hand_out(scheduler, 1, 2, num_tokens=5).result(TIMEOUT)
    hand_out(scheduler, 3, num_tokens=7).result(TIMEOUT)
    backend.failures[2] = RuntimeError("no such page")
    with pytest.raises(LoadFailedError):
        hand_out(scheduler, 4, num_tokens=100).result(TIMEOUT)
    scheduler.pop_acks()

    stats = scheduler.stats()
    assert (stats.landed_bursts, stats.failed_bursts, stats.cancelled_bursts) == (2, 1, 0)
    assert (stats.loaded_tokens, stats.loaded_bytes) == (17, 300), "a failed burst loads nothing"
    assert (stats.free_slots, stats.acks_unpopped) == (3, 0)


class SizedBackend(LaunchingBackend):
    """Says that a burst moves 100 bytes per op."""

    class Prepared(list[int]):
        @property
        def num_bytes(self) -> int:
            return 100 * len(self)

    def prepare(self, ops: Any) -> Any:
        return self.Prepared(super().prepare(ops))


def test_a_cancelled_burst_counts_as_cancelled(device: EmulatedDevice, make_scheduler: MakeScheduler) -> None:
    backend = LaunchingBackend(device)
    scheduler = make_scheduler(backend)
    backend.gate.clear()
    hand_out(scheduler, 1)
    assert hand_out(scheduler, 2).cancel()
    backend.release()
    hand_out(scheduler, 3).result(TIMEOUT)

    stats = scheduler.stats()
    assert (stats.landed_bursts, stats.failed_bursts, stats.cancelled_bursts) == (2, 0, 1)
    assert stats.loaded_tokens == 8


def test_a_slot_is_free_once_its_burst_has_landed(device: EmulatedDevice, make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    device.hold("h2d")
    first = hand_out(scheduler, 1)
    hand_out(scheduler, 2)
    assert scheduler.stats().free_slots == 1
    device.step("h2d", 4)
    first.result(TIMEOUT)
    assert scheduler.stats().free_slots == 2


def test_totals_go_on_over_a_reset(make_scheduler: MakeScheduler, plane: str) -> None:
    scheduler = make_scheduler()
    hand_out(scheduler, 1)
    scheduler.reset(TIMEOUT)
    assert scheduler.stats() == dataclasses.replace(NOTHING, plane=plane, landed_bursts=1, loaded_tokens=4)


# -- idle ---------------------------------------------------------------------------------------------------------


@MODES
def test_it_is_idle_only_when_nothing_is_queued_handed_out_or_unacknowledged(
    device: EmulatedDevice, make_scheduler: MakeScheduler, mode: str
) -> None:
    scheduler = make_scheduler(mode=mode)
    seen = {"fresh": scheduler.idle}
    scheduler.load(load_op(1))
    seen["an op is queued"] = scheduler.idle
    device.hold("h2d")
    handle = scheduler.start_loading_sync(TIMEOUT)
    assert handle is not None
    seen["a burst is handed out"] = scheduler.idle
    device.resume("h2d")
    handle.result(TIMEOUT)
    seen["its ack has not been popped"] = scheduler.idle
    scheduler.pop_acks()
    seen["its ack has been popped"] = scheduler.idle

    assert [state for state, idle in seen.items() if idle] == ["fresh", "its ack has been popped"]


@MODES
def test_without_polling_it_is_idle_once_everything_has_landed(make_scheduler: MakeScheduler, mode: str) -> None:
    scheduler = make_scheduler(mode=mode, poll_acks=False)
    hand_out(scheduler, 1).result(TIMEOUT)
    assert scheduler.idle


# -- acks ---------------------------------------------------------------------------------------------------------


@MODES
def test_each_ack_is_popped_once_and_in_hand_out_order(make_scheduler: MakeScheduler, mode: str) -> None:
    scheduler = make_scheduler(mode=mode)
    handles = [hand_out(scheduler, node_id) for node_id in range(7)]
    acks = [handle.result(TIMEOUT) for handle in handles]

    assert scheduler.pop_acks() == acks
    assert [ack.burst_id for ack in acks] == [1, 2, 3, 4, 5, 6, 7]
    assert scheduler.pop_acks() == []


@MODES
def test_an_ack_says_which_burst_ended_how_and_what_it_moved(
    device: EmulatedDevice, make_scheduler: MakeScheduler, mode: str
) -> None:
    scheduler = make_scheduler(SizedBackend(device), mode=mode)
    handle = hand_out(scheduler, 8, 9, num_tokens=5)
    ack = handle.result(TIMEOUT)

    assert (ack.burst_id, ack.slot, ack.generation) == (handle.burst_id, handle.slot, handle.generation)
    assert (ack.status, ack.error) == (AckStatus.OK, None)
    assert (ack.node_ids, ack.num_tokens, ack.num_tokens_by_pool, ack.num_bytes) == ((8, 9), 10, {"kv": 10}, 200)
    assert ack.duration_ms is not None
    assert ack.duration_ms >= 0


@MODES
def test_the_duration_is_device_time_from_the_first_copy_to_the_finish_event(
    device: EmulatedDevice, make_scheduler: MakeScheduler, mode: str
) -> None:
    class SlowBackend(LaunchingBackend):
        def enqueue_layer(self, prepared: Any, layer: int) -> None:
            device.launch(lambda: None, engine="h2d", duration=0.002)

    ack = hand_out(make_scheduler(SlowBackend(device), mode=mode), 1).result(TIMEOUT)
    assert ack.duration_ms is not None
    assert ack.duration_ms >= 4 * 2.0


@MODES
def test_without_polling_no_ack_is_kept_and_on_ack_gets_them_all(make_scheduler: MakeScheduler, mode: str) -> None:
    acks: list[Any] = []
    scheduler = make_scheduler(mode=mode, poll_acks=False, on_ack=acks.append)
    expected = [hand_out(scheduler, node_id).result(TIMEOUT) for node_id in range(4)]
    assert scheduler.pop_acks() == []
    assert scheduler.stats().acks_unpopped == 0
    scheduler.close(TIMEOUT)
    assert acks == expected


def test_a_backlog_of_unpopped_acks_is_logged_once_with_the_way_out_and_none_is_dropped(
    device: EmulatedDevice, make_scheduler: MakeScheduler, logs: list[Any]
) -> None:
    scheduler = make_scheduler(LaunchingBackend(device, num_layers=1), mode="inline")

    def load_bursts(n: int) -> None:
        for _ in range(n):
            hand_out(scheduler, 1, num_tokens=1).result(TIMEOUT)

    load_bursts(ACK_BACKLOG)
    assert warnings(logs) == []
    load_bursts(2)
    (warning,) = warnings(logs)
    assert (warning["log_level"], warning["acks_unpopped"]) == ("warning", ACK_BACKLOG + 1)
    assert "pop_acks()" in warning["way_out"]
    assert "poll_acks=False" in warning["way_out"]
    assert [ack.burst_id for ack in scheduler.pop_acks()] == list(range(1, ACK_BACKLOG + 3))


def warnings(logs: list[Any]) -> list[Any]:
    return [entry for entry in logs if entry["event"] == "ack_backlog"]


def test_the_backlog_is_4096_acks() -> None:
    assert ACK_BACKLOG == 4096


async def test_acks_can_be_popped_while_bursts_land_without_losing_or_doubling_one(
    make_scheduler: MakeScheduler,
) -> None:
    scheduler = make_scheduler()
    popped: list[Any] = []
    handles = []
    for node_id in range(50):
        scheduler.load(load_op(node_id))
        handles.append(await scheduler.start_loading())
        popped += scheduler.pop_acks()
    for handle in handles:
        assert handle is not None
        await asyncio.wait_for(handle, TIMEOUT)
    popped += scheduler.pop_acks()
    assert [ack.node_ids for ack in popped] == [(node_id,) for node_id in range(50)]
