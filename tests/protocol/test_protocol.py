"""Every interleaving of the protocol keeps its invariants, and each mechanism is there for a reason.

All actions at once, with four bursts, are too many interleavings, so they are split into scenarios: each has four
bursts and two layers, runs with two and with three slots, and is explored to the end. Actions that interact share a
scenario; those that do not touch the same words never need to meet.

    hand_outs        ops merge and join; a hand-out waits, is cancelled or times out, its records fail; handles cancel
    failures         every burst may fail at every point of the data plane's work, or be cancelled
    any_wait         one waiter, on any layer of any burst, current or old; it may time out
    waits            two waiters on one burst that has a predecessor and two successors, on any of its layers
    waits_apart      two waiters on two bursts, which may be handed the same events one after the other
    failed_waits     two waiters on the last layer of a burst that may fail or be cancelled; waiters time out
    waits_on_failure one waiter on the first layer of a burst that, like its predecessor, may fail
    resets           two resets, with and without timeout, beside hand-outs that wait and leave
    reset_faults     a reset that drains failed and cancelled bursts
    reset_waits      a waiter that begins before a reset and goes on after it
    closes           close, with and without timeout, twice, with failed and cancelled bursts; then inline, failing too
    close_waits      a waiter that begins before a close and goes on after it
    reset_and_close  both at once, with hand-outs that wait and leave
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from functools import cache
from typing import NamedTuple

import pytest

from tests.protocol.explorer import Exploration, Move, explore, goes_in_circles
from tests.protocol.model import Invariant, Mechanism, Protocol, Scenario

ALL_BURSTS = (0, 1, 2, 3)
ALL_LAYERS = tuple((b, layer) for b in ALL_BURSTS for layer in (0, 1))
SCENARIOS = {
    "hand_outs": Scenario(2, hand_out_leaves=True, failed_hand_outs=True, cancels=ALL_BURSTS),
    "failures": Scenario(2, ops_ahead=0, fails=ALL_BURSTS, cancels=ALL_BURSTS),
    "any_wait": Scenario(2, ops_ahead=0, waiters=1, waits=ALL_LAYERS, waits_leave=True),
    "waits": Scenario(2, ops_ahead=0, waiters=2, waits=((1, 0), (1, 1))),
    "waits_apart": Scenario(2, ops_ahead=0, waiters=2, waits=((0, 1), (1, 0))),
    "failed_waits": Scenario(2, ops_ahead=0, waiters=2, waits=((1, 1),), waits_leave=True, fails=(1,), cancels=(1,)),
    "waits_on_failure": Scenario(2, ops_ahead=0, waiters=1, waits=((1, 0),), fails=(0, 1), cancels=(1,)),
    "resets": Scenario(2, ops_ahead=1, resets=2, hand_out_leaves=True),
    "reset_faults": Scenario(2, ops_ahead=1, resets=1, hand_out_leaves=True, fails=(0,), cancels=(1,)),
    "reset_waits": Scenario(2, ops_ahead=1, resets=1, waiters=1, waits=((0, 1),)),
    "closes": Scenario(2, ops_ahead=1, closes=2, hand_out_leaves=True, fails=(0, 3), cancels=(1,)),
    "close_waits": Scenario(2, ops_ahead=1, closes=2, waiters=1, waits=((1, 1),)),
    "reset_and_close": Scenario(2, ops_ahead=1, resets=1, closes=2, hand_out_leaves=True),
}


class Protection(NamedTuple):
    """The invariant that a mechanism protects, and a scenario that shows it."""

    invariant: Invariant
    scenario: str


PROTECTIONS = {
    Mechanism.SLOT_LOOKS_AT_SUBMITTED: Protection(Invariant.SLOT_SAFETY, "hand_outs"),
    Mechanism.SLOT_LOOKS_AT_FINISH: Protection(Invariant.SLOT_SAFETY, "hand_outs"),
    Mechanism.CLAIM_AFTER_WAIT: Protection(Invariant.NO_OP_LOST, "hand_outs"),
    Mechanism.HAND_OUT_LOOKS_AT_EPOCH: Protection(Invariant.RESET_IS_FINAL, "resets"),
    Mechanism.HAND_OUT_LOOKS_AT_RESETTING: Protection(Invariant.RESET_IS_FINAL, "resets"),
    Mechanism.HAND_OUT_LOOKS_AT_CLOSING: Protection(Invariant.NOTHING_HANGS, "closes"),
    Mechanism.FAILED_HAND_OUT_IS_ACKED: Protection(Invariant.NOTHING_HANGS, "hand_outs"),
    Mechanism.QUEUE_IS_FIFO: Protection(Invariant.FIFO_ENQUEUE, "failures"),
    Mechanism.ONE_BURST_AT_A_TIME: Protection(Invariant.NO_INTERLEAVING, "failures"),
    Mechanism.DROP_CANCELLED: Protection(Invariant.CANCEL_IS_CLEAN, "hand_outs"),
    Mechanism.CANCEL_LOOKS_AT_BEGUN: Protection(Invariant.CANCEL_IS_CLEAN, "hand_outs"),
    Mechanism.WATERMARK_AFTER_RECORD: Protection(Invariant.REAL_WAIT, "any_wait"),
    Mechanism.SUBMITTED_AFTER_FINISH: Protection(Invariant.SLOT_SAFETY, "failures"),
    Mechanism.FAILURE_RECORDS_LAYERS: Protection(Invariant.OWN_EVENTS, "failures"),
    Mechanism.FAILURE_RECORDS_FINISH: Protection(Invariant.ACK_AFTER_COPIES, "failures"),
    Mechanism.FAILURE_SAYS_ENQUEUED: Protection(Invariant.REAL_WAIT, "waits_on_failure"),
    Mechanism.FAILURE_RELEASES_WAITERS: Protection(Invariant.NOTHING_HANGS, "waits_on_failure"),
    Mechanism.CANCEL_RELEASES_WAITERS: Protection(Invariant.NOTHING_HANGS, "waits_on_failure"),
    Mechanism.LANDED_STAYS_BEHIND_ENQUEUED: Protection(Invariant.REAL_WAIT, "any_wait"),
    Mechanism.END_AFTER_LANDED: Protection(Invariant.LANDED_IN_ORDER, "failures"),
    Mechanism.END_LOOKS_AT_SUBMITTED: Protection(Invariant.ACK_AFTER_COPIES, "failures"),
    Mechanism.END_LOOKS_AT_FINISH: Protection(Invariant.ACK_AFTER_COPIES, "failures"),
    Mechanism.ACKS_IN_ORDER: Protection(Invariant.FIFO_ACKS, "hand_outs"),
    Mechanism.STALE_ACK_COUNTS_NOTHING: Protection(Invariant.STALE_ACK_IS_EMPTY, "failures"),
    Mechanism.WAIT_FOR_ENQUEUED: Protection(Invariant.REAL_WAIT, "any_wait"),
    Mechanism.EVENTS_BELONG_TO_BURST: Protection(Invariant.NO_STALE_WAIT, "any_wait"),
    Mechanism.HOLD_KEEPS_EVENT_SET: Protection(Invariant.NO_STALE_WAIT, "any_wait"),
    Mechanism.HOLD_WITH_FIRST_LOOK: Protection(Invariant.NO_STALE_WAIT, "any_wait"),
    Mechanism.LAST_HOLDER_GIVES_BACK: Protection(Invariant.EVENT_SETS_RETURN, "any_wait"),
    Mechanism.LEAVING_WAITER_LETS_GO: Protection(Invariant.EVENT_SETS_RETURN, "any_wait"),
    Mechanism.RESET_DRAINS: Protection(Invariant.RESET_IS_FINAL, "reset_faults"),
    Mechanism.RESET_CLEARS_ACKS: Protection(Invariant.RESET_IS_FINAL, "reset_faults"),
    Mechanism.RESET_RESTARTS_ROTATION: Protection(Invariant.SLOT_ROTATION, "resets"),
    Mechanism.RESET_KEEPS_GENERATIONS: Protection(Invariant.ONE_NAME, "resets"),
    Mechanism.RESET_TIMEOUT_LETS_GO: Protection(Invariant.NOTHING_HANGS, "resets"),
    Mechanism.CLOSE_DRAINS: Protection(Invariant.ONE_SUBMITTER, "closes"),
    Mechanism.NO_INLINE_WHILE_CLOSING: Protection(Invariant.ONE_SUBMITTER, "closes"),
}

STEPS = (
    "engine: loads an op",
    "engine: loads an op that joins",
    "hand-out: waits",
    "hand-out: burst 3 takes slot",
    "its event records fail",
    "and submits it inline",
    "and fails inline, 1 layers submitted",
    "hand-out: is cancelled or times out",
    "hand-out: returns None after a reset",
    "hand-out: raises, closed",
    "data plane: drops cancelled burst",
    "data plane: fails, 0 layers",
    "data plane: fails, 1 layers of burst 0 submitted and 0 enqueued",
    "data plane: fails, 1 layers of burst 0 submitted and 1 enqueued",
    "data plane: fails, 2 layers of burst 0 submitted and 2 enqueued",
    "observer: layer 1 of burst 3 landed",
    "handle: cancels",
    "waiter: begins to wait for layer 1 of burst 3",
    "waiter: begins to wait for layer 0 of burst 0 and returns",
    "waiter: sees",
    "waiter: orders",
    "will not be enqueued",
    "waiter: leaves",
    "reset: begins",
    "reset: returns",
    "reset: times out",
    "close: begins",
    "close: returns",
    "close: times out",
)


@cache
def explored(name: str, num_slots: int) -> Exploration:
    """The whole protocol within a scenario; several tests look at one exploration."""
    return Protocol(replace(SCENARIOS[name], num_slots=num_slots)).explore()


@pytest.mark.parametrize("num_slots", [2, 3])
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_interleaving_keeps_every_invariant(name: str, num_slots: int) -> None:
    exploration = explored(name, num_slots)
    print(f"{name}, {num_slots} slots: {exploration.states} states, {exploration.moves} moves")
    assert exploration.violation is None, str(exploration.violation)
    assert exploration.exhaustive


@pytest.mark.parametrize("num_slots", [2, 3])
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_hands_out_and_ends_four_bursts(name: str, num_slots: int) -> None:
    labels = explored(name, num_slots).labels
    assert all(f"observer: ends burst {b}" in labels for b in ALL_BURSTS)


@pytest.mark.parametrize("num_slots", [2, 3])
@pytest.mark.parametrize("step", STEPS)
def test_some_scenario_takes_every_kind_of_step(step: str, num_slots: int) -> None:
    assert any(step in label for name in SCENARIOS for label in explored(name, num_slots).labels)


@pytest.mark.parametrize("mechanism", Mechanism, ids=lambda mechanism: mechanism.name)
def test_without_a_mechanism_its_invariant_breaks(mechanism: Mechanism) -> None:
    protection = PROTECTIONS[mechanism]
    whole = explored(protection.scenario, 2)
    assert whole.exhaustive
    assert whole.violation is None

    violation = Protocol(SCENARIOS[protection.scenario], without=mechanism).explore().violation
    print(f"without {mechanism.name} ({mechanism.value}):\n{violation}")
    assert violation is not None
    assert violation.invariant is protection.invariant


def test_every_invariant_is_protected_by_some_mechanism() -> None:
    assert {protection.invariant for protection in PROTECTIONS.values()} == set(Invariant)


def test_nothing_is_under_way_for_ever() -> None:
    everything = Scenario(
        2,
        loads=2,
        ops_ahead=1,
        num_layers=1,
        waiters=1,
        waits=((0, 0),),
        waits_leave=True,
        fails=(0,),
        cancels=(1,),
        failed_hand_outs=True,
        hand_out_leaves=True,
        resets=1,
        closes=1,
    )
    protocol = Protocol(everything)
    assert not goes_in_circles(protocol.start(), protocol.moves)


class Promise(Enum):
    """What the little models below keep or break."""

    BELOW_THREE = "a count stays below three"
    AT_REST = "nothing is outstanding"


def _below_three(count: int) -> Promise | None:
    return Promise.BELOW_THREE if count >= 3 else None


def _never(count: int) -> Promise | None:
    return None


def _always(count: int) -> Promise | None:
    return Promise.AT_REST


def test_the_explorer_gives_the_shortest_trace_to_a_violation() -> None:
    def by_one_or_two(count: int) -> list[Move[int]]:
        return [Move("one", count + 1), Move("two", count + 2)]

    found = explore(0, by_one_or_two, _below_three, _never).violation
    assert found is not None
    assert (found.invariant, len(found.trace)) == (Promise.BELOW_THREE, 2)


def test_the_explorer_asks_what_is_outstanding_only_where_no_owed_move_is_left() -> None:
    def owed_then_optional(count: int) -> list[Move[int]]:
        return [Move("owed", 1)] if count == 0 else [Move("optional", 2, owed=False)]

    found = explore(0, owed_then_optional, _never, _always).violation
    assert found is not None
    assert found.trace == ("owed",)


def test_the_explorer_says_when_it_did_not_see_everything() -> None:
    cut_short = explore(0, lambda count: [Move("on", count + 1)], _never, _never, limit=10)
    assert not cut_short.exhaustive
    assert cut_short.violation is None


def test_the_explorer_tells_a_circle_of_owed_moves_from_one_that_takes_a_call() -> None:
    assert goes_in_circles(0, lambda count: [Move("on", (count + 1) % 3)])
    assert not goes_in_circles(0, lambda count: [Move("on", (count + 1) % 3, owed=count < 2)])
