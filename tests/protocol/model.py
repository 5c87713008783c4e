"""The protocol of slots, watermarks, event sets and acks, as the scheduler keeps it, in small plain Python.

Each actor is a method of `Protocol` that yields the steps that the actor could take now. A step is atomic: in the
scheduler it is one critical section or one device call, and whoever waits looks again, at any time. An *owed* move is
one that its actor makes by itself; the others are calls, faults, cancellations and timeouts, which may come or not.
Each protection is a `Mechanism` that `Protocol(without=...)` takes out; what must hold is an `Invariant`.

Modelled
    engine      loads an op; hands out: claims at once, or waits and looks again until it claims, is cancelled, times
                out, finds its ops dropped by a reset or the scheduler closing; hands out while event records fail;
                works inline after close
    data plane  begins a burst, submits a layer, says so (`enqueued`), records the finish event, leaves the burst; or
                drops a cancelled burst; or fails before a layer, in the middle of a layer's copies, between a layer
                and saying so, or before the finish event
    device      the h2d stream: copies and event records, first in first out. An event knows its latest record only; a
                wait captures that record; a never-recorded event is complete, and waiting on it does nothing
    observer    lands layers, publishes acks, gives event sets back to the pool
    handle      `cancel`; `wait_layer` in its single steps, through current and through old handles
    reset       drains, drops, restarts the rotation; or times out
    close       drains and closes; or times out, and may be tried again

Not modelled
    Bytes, the index move, start and fence events: they order a burst's copies behind work that is none of ours.
    Futures, callbacks, logs, `pop_acks`: they follow the watermarks and the acks and change neither.
    Wake-ups: a wake-up is a hint. Here whoever waits may look at any time, so a wake-up that is missing goes unseen.
    Device calls that fail while a failure is being recorded; a lost device; threads that die.

What keeps the state space small, and why no interleaving that matters is lost
    - A layer's copies and its event record are one step and one item of the stream. They are adjacent in a
      first-in-first-out stream with one submitter, and nobody learns of the copies but through the event.
    - A failure's records are one item, too, with the copies of a layer cut short in front of them: nobody waits for
      the layers' own records then, and copies that are still pending are what the invariants are hardest on.
    - A waiter lets go in the step in which its stream captured the record: holding longer only delays a give-back.
    - A stream that waits for a record passes in the very step that completes it: passing changes nothing shared.
    - Waiters are interchangeable and kept sorted.
    - What nobody can read any more is forgotten: how far an ended burst had got, what a returned waiter waited for,
      and an event set in the pool, which is as good as a new one once no burst refers to it.
    - Whether a waiter holds a set is read off the waiters instead of being counted a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from tests.protocol.explorer import Exploration, Move, explore

T = TypeVar("T")


class Invariant(Enum):
    """What must hold in every state."""

    FIFO_ENQUEUE = "bursts are enqueued in hand-out order"
    NO_INTERLEAVING = "layers of two bursts never interleave on the h2d stream"
    SLOT_ROTATION = "slots are handed out in turn, from slot 0 after a reset"
    FIFO_ACKS = "each burst ends with exactly one ack, in hand-out order"
    SLOT_SAFETY = "a slot is handed out only when the data plane and the device are done with its previous burst"
    ONE_NAME = "a slot and a generation name one burst for ever"
    REAL_WAIT = "a waiter that returns is behind its layer's copies, or they will never be submitted"
    NO_STALE_WAIT = "a wait is never captured on an event that a later burst recorded"
    LANDED_IN_ORDER = "an ended burst has landed what it enqueued"
    OWN_EVENTS = "a burst that the data plane has left has recorded every layer's event itself"
    ACK_AFTER_COPIES = "an ack is published only after the copies that were submitted have landed"
    STALE_ACK_IS_EMPTY = "the ack of a failed or cancelled burst has 0 tokens"
    CANCEL_IS_CLEAN = "a cancelled burst submits nothing"
    NO_OP_LOST = "an op is queued, in a burst, or dropped by a reset"
    RESET_IS_FINAL = "nothing from before a reset is handed out or acknowledged after it returned"
    ONE_SUBMITTER = "two threads never submit on one stream"
    EVENT_SETS_RETURN = "at rest every event set is in the pool, once"
    NOTHING_HANGS = "at rest every call has returned and every burst has ended"


class Mechanism(Enum):
    """One protection of the protocol; the value says what it is."""

    SLOT_LOOKS_AT_SUBMITTED = "a slot is free only when the data plane has left its burst"
    SLOT_LOOKS_AT_FINISH = "a slot is free only when its burst's finish event has completed"
    CLAIM_AFTER_WAIT = "a hand-out takes slot and ops in one step, after its wait"
    HAND_OUT_LOOKS_AT_EPOCH = "a hand-out that waited through a reset returns None"
    HAND_OUT_LOOKS_AT_RESETTING = "nothing is handed out while a reset drains"
    HAND_OUT_LOOKS_AT_CLOSING = "a waiting hand-out gives up when the scheduler closes"
    FAILED_HAND_OUT_IS_ACKED = "a hand-out whose event records fail still goes to the landing observer"
    QUEUE_IS_FIFO = "the data plane takes the oldest burst"
    ONE_BURST_AT_A_TIME = "the data plane leaves a burst before it begins the next"
    DROP_CANCELLED = "the data plane drops a cancelled burst"
    CANCEL_LOOKS_AT_BEGUN = "cancel fails once the data plane has begun"
    WATERMARK_AFTER_RECORD = "`enqueued` advances after the layer's event was recorded"
    SUBMITTED_AFTER_FINISH = "`submitted` is set after the finish event was recorded"
    FAILURE_RECORDS_LAYERS = "a failure records the events of the layers not submitted"
    FAILURE_RECORDS_FINISH = "a failure records the finish event"
    FAILURE_SAYS_ENQUEUED = "a failure first advances `enqueued` to what was recorded"
    FAILURE_RELEASES_WAITERS = "a waiter for a layer that a failed burst did not enqueue returns"
    CANCEL_RELEASES_WAITERS = "a waiter for a layer of a cancelled burst returns"
    LANDED_STAYS_BEHIND_ENQUEUED = "`landed` never passes `enqueued`"
    END_AFTER_LANDED = "a burst ends after `landed` has reached `enqueued`"
    END_LOOKS_AT_SUBMITTED = "a burst ends only when the data plane has left it"
    END_LOOKS_AT_FINISH = "a burst ends only when its finish event has completed"
    ACKS_IN_ORDER = "only the oldest burst in flight may end"
    STALE_ACK_COUNTS_NOTHING = "a failed or cancelled burst is published with 0 tokens"
    WAIT_FOR_ENQUEUED = "a wait first waits for `enqueued`"
    EVENTS_BELONG_TO_BURST = "a wait uses the events of its own burst, not those of the slot"
    HOLD_KEEPS_EVENT_SET = "an event set is not given back while a waiter holds it"
    HOLD_WITH_FIRST_LOOK = "a waiter takes its hold in the step in which it sees that the burst has not ended"
    LAST_HOLDER_GIVES_BACK = "the last waiter that lets go after the end gives the event set back"
    LEAVING_WAITER_LETS_GO = "a waiter that times out or is interrupted lets go too"
    RESET_DRAINS = "a reset waits until nothing is in flight"
    RESET_CLEARS_ACKS = "a reset clears the acks"
    RESET_RESTARTS_ROTATION = "a reset restarts the rotation at slot 0"
    RESET_KEEPS_GENERATIONS = "generations go on over a reset"
    RESET_TIMEOUT_LETS_GO = "a reset that times out lets hand-outs go on"
    CLOSE_DRAINS = "close waits until nothing is in flight"
    NO_INLINE_WHILE_CLOSING = "nothing is submitted inline before close has finished"


UNRECORDED = -1
"""The record of an event that was never recorded, or whose record by an earlier burst is complete: to a query and to a
wait these look alike."""
NOBODY = -1

Life: TypeAlias = Literal["running", "closing", "closed"]
WaiterStep: TypeAlias = Literal["absent", "looks", "orders", "behind", "returned"]


class Burst(NamedTuple):
    """One burst from hand-out to ack."""

    slot: int
    generation: int
    begun: bool = False
    event_set: int | None = None
    """Index of its event set; None before the data plane began and for a burst that never needed one."""
    copied: int = 0
    """Layers whose copies and event record are on the h2d stream."""
    enqueued: int = 0
    landed: int = 0
    failing: bool = False
    """The data plane has failed and recorded what was left, but not said so yet."""
    failed: bool = False
    cancelled: bool = False
    submitted: bool = False
    """The data plane will not touch it any more."""
    ended: bool = False
    forgotten: bool = False
    """Ended, and nobody refers to it: all else but its name is blank."""


class Item(NamedTuple):
    """One item of the h2d stream: copies, an event record, or copies with the record behind them."""

    burst: int
    copies: bool
    event: int | None
    """A layer, or the finish event, which comes after the last layer's; None for the copies of a layer cut short."""


class Waiter(NamedTuple):
    """One call of `wait_layer`."""

    step: WaiterStep = "absent"
    burst: int = NOBODY
    layer: int = 0
    record: int = UNRECORDED
    """The burst whose record of the event the caller's stream waits for."""


class HandOut(NamedTuple):
    """A hand-out that waits for a slot."""

    epoch: int
    ops: int = 0
    """Ops that it took before its wait; always 0 but for `Mechanism.CLAIM_AFTER_WAIT`."""


class State(NamedTuple):
    """Everything shared, and where each actor is."""

    slots: tuple[int | None, ...]
    generations: tuple[int, ...]
    waiters: tuple[Waiter, ...]
    loads_left: int
    resets_left: int
    closes_left: int
    ops: int = 0
    next_slot: int = 0
    bursts: tuple[Burst, ...] = ()
    queue: tuple[int, ...] = ()
    in_flight: tuple[int, ...] = ()
    acks: tuple[int, ...] = ()
    stream: tuple[Item, ...] = ()
    event_sets: tuple[tuple[int, ...], ...] = ()
    """Per event set and event, the burst that recorded it last."""
    pool: tuple[int, ...] = ()
    hand_out: HandOut | None = None
    epoch: int = 0
    resetting: bool = False
    life: Life = "running"
    reset_waits: bool = False
    close_waits: bool = False

    # What only the invariants look at.
    loads: int = 0
    handed_over: int = 0
    """Ops in bursts."""
    dropped: int = 0
    """Ops dropped by resets."""
    acked: int = 0
    """Bursts acknowledged so far."""
    first_since_reset: int = 0
    """The first burst that the latest reset did not drain."""
    last_on_stream: int = 0
    """The burst that submitted last."""
    broken: Invariant | None = None
    """What the step that led here broke."""


@dataclass(frozen=True)
class Scenario:
    """The bounds of an exploration: which calls and faults may happen, and how often."""

    num_slots: int
    loads: int = 4
    ops_ahead: int = 4
    """How many ops may be queued at a time. With 0 a hand-out brings its own op, in one step: only the engine and a
    reset ever look at the queued ops, so without resets nobody can tell."""
    num_layers: int = 2
    waits: tuple[tuple[int, int], ...] = ()
    """(burst, layer) pairs; each waiter picks any of them, at any time from the hand-out on."""
    waiters: int = 0
    waits_leave: bool = False
    """A waiter may time out or be interrupted before it has seen its layer enqueued."""
    fails: tuple[int, ...] = ()
    """Bursts that may fail, at any point of the data plane's work."""
    cancels: tuple[int, ...] = ()
    """Bursts whose handles may be cancelled."""
    failed_hand_outs: bool = False
    hand_out_leaves: bool = False
    """A waiting hand-out may be cancelled or time out."""
    resets: int = 0
    closes: int = 0


class Protocol:
    """The protocol within a scenario, whole or without one mechanism."""

    def __init__(self, scenario: Scenario, without: Mechanism | None = None) -> None:
        self.scenario = scenario
        self.without = without
        self.num_layers = scenario.num_layers
        self.finish = scenario.num_layers  # the finish event's place in an event set

    def explore(self) -> Exploration:
        return explore(self.start(), self.moves, broken, unfinished)

    def start(self) -> State:
        scenario = self.scenario
        return State(
            slots=(None,) * scenario.num_slots,
            generations=(0,) * scenario.num_slots,
            waiters=(Waiter(),) * scenario.waiters,
            loads_left=scenario.loads,
            resets_left=scenario.resets,
            closes_left=scenario.closes,
        )

    def moves(self, s: State) -> Iterator[Move[State]]:
        """Every step that some actor could take now."""
        if s.hand_out is None:
            yield from self.engine_calls(s)
        else:
            yield from self.hand_out_waits(s, s.hand_out)
        if s.queue:
            yield from self.data_plane(s)
        if s.stream:
            yield self.step("device: completes " + _named(s.stream[0]), s._replace(stream=s.stream[1:]))
        if s.in_flight:
            yield from self.landing_observer(s)
        if self.scenario.cancels:
            yield from self.handle_cancels(s)
        for number, waiter in enumerate(s.waiters):
            if waiter not in s.waiters[:number]:  # two that are alike make the same moves
                yield from self.wait_layer(s, number, waiter)
        yield from self.reset(s)
        yield from self.close(s)

    def keeps(self, mechanism: Mechanism) -> bool:
        return self.without is not mechanism

    def step(self, label: str, state: State, owed: bool = True) -> Move[State]:
        return Move(label, self.settled(state), owed)

    # ---- engine: load and hand-out -------------------------------------------------------------------------------

    def engine_calls(self, s: State) -> Iterator[Move[State]]:
        """`load` and `start_loading`, one at a time; both raise while closing, which changes nothing."""
        if s.life == "closing" and self.keeps(Mechanism.NO_INLINE_WHILE_CLOSING):
            return
        if s.loads_left and s.ops < self.scenario.ops_ahead:
            yield self.step("engine: loads an op", self.loaded(s), owed=False)
        if s.loads_left and not s.ops and not self.scenario.ops_ahead:
            s = self.loaded(s)
        if s.ops:
            hand_out = HandOut(s.epoch)
            if not self.keeps(Mechanism.CLAIM_AFTER_WAIT):
                hand_out = HandOut(s.epoch, s.ops)
                s = s._replace(ops=0)
            if self.may_claim(s):
                yield from self.claims(s, hand_out, owed=False)
            else:
                yield self.step("hand-out: waits", s._replace(hand_out=hand_out), owed=False)

    def hand_out_waits(self, s: State, hand_out: HandOut) -> Iterator[Move[State]]:
        """A waiting hand-out looks again, or is cancelled or times out; meanwhile an op may join.

        One that first looks after a close has ended claims here; the scheduler is stricter and raises.
        """
        gone = s._replace(hand_out=None)
        if hand_out.epoch != s.epoch and self.keeps(Mechanism.HAND_OUT_LOOKS_AT_EPOCH):
            yield self.step("hand-out: returns None after a reset", gone)
        elif s.life == "closing" and self.keeps(Mechanism.HAND_OUT_LOOKS_AT_CLOSING):
            yield self.step("hand-out: raises, closed", gone)
        elif self.may_claim(s):
            yield from self.claims(s, hand_out, owed=True)
        if self.scenario.hand_out_leaves:
            yield self.step("hand-out: is cancelled or times out", gone, owed=False)
        if s.loads_left and s.ops < self.scenario.ops_ahead and s.life != "closing":
            yield self.step("engine: loads an op that joins", self.loaded(s), owed=False)

    def loaded(self, s: State) -> State:
        return s._replace(ops=s.ops + 1, loads=s.loads + 1, loads_left=s.loads_left - 1)

    def may_claim(self, s: State) -> bool:
        if s.resetting and self.keeps(Mechanism.HAND_OUT_LOOKS_AT_RESETTING):
            return False
        if s.life == "closing" and self.keeps(Mechanism.NO_INLINE_WHILE_CLOSING):
            return False
        return self.slot_free(s, s.next_slot)

    def slot_free(self, s: State, slot: int) -> bool:
        """Read from the slot's own state and finish event, not from what the observer has noticed so far."""
        b = s.slots[slot]
        if b is None or s.bursts[b].ended:
            return True
        left = s.bursts[b].submitted or not self.keeps(Mechanism.SLOT_LOOKS_AT_SUBMITTED)
        landed = self.complete(s, b, self.finish) or not self.keeps(Mechanism.SLOT_LOOKS_AT_FINISH)
        return left and landed

    def claims(self, s: State, hand_out: HandOut, owed: bool) -> Iterator[Move[State]]:
        """The hand-out takes slot and ops, records start and fence event, and queues the burst, in one step."""
        slot, b = s.next_slot, len(s.bursts)
        generation = s.generations[slot] + 1
        label = f"hand-out: burst {b} takes slot {slot} generation {generation}"
        claimed = s._replace(
            hand_out=None,
            ops=0,
            handed_over=s.handed_over + s.ops + hand_out.ops,
            slots=put(s.slots, slot, b),
            generations=put(s.generations, slot, generation),
            next_slot=(slot + 1) % len(s.slots),
            bursts=(*s.bursts, Burst(slot, generation)),
            in_flight=(*s.in_flight, b),
            broken=self.broken_by_claim(s, hand_out, slot, generation),
        )
        if self.scenario.failed_hand_outs:
            yield self.step(label + ", its event records fail", self.claimed_but_failed(claimed, b), owed=False)
        if s.life == "running":
            yield self.step(label, claimed._replace(queue=(*s.queue, b)), owed)
            return
        yield self.step(label + " and submits it inline", self.submitted_inline(claimed, b, self.num_layers), owed)
        if b in self.scenario.fails:
            for layers in range(self.num_layers):
                failed = self.submitted_inline(claimed, b, layers)
                yield self.step(f"{label} and fails inline, {layers} layers submitted", failed, owed=False)

    def claimed_but_failed(self, s: State, b: int) -> State:
        """The burst goes straight to the landing observer, which acks it in its turn; the data plane never sees it."""
        if not self.keeps(Mechanism.FAILED_HAND_OUT_IS_ACKED):
            s = s._replace(in_flight=s.in_flight[:-1])
        return s._replace(bursts=put(s.bursts, b, s.bursts[b]._replace(failed=True, submitted=True)))

    def submitted_inline(self, s: State, b: int, layers: int) -> State:
        """After close the caller does the data plane's work, in its own step; it fails where layers are missing."""
        if s.life != "closed" or s.queue:
            s = s._replace(broken=s.broken or Invariant.ONE_SUBMITTER)
        s = self.begun(s, b)
        for layer in range(layers):
            s = self.says_enqueued(self.submitted_layer(s, b, layer), b)
        if layers < self.num_layers:
            return self.given_up(self.failing(s, b), b)
        return self.left(self.recorded_finish(s, b), b)

    def broken_by_claim(self, s: State, hand_out: HandOut, slot: int, generation: int) -> Invariant | None:
        previous = s.slots[slot]
        if previous is not None and not _over(s, previous):
            return Invariant.SLOT_SAFETY
        if slot != (len(s.bursts) - s.first_since_reset) % len(s.slots):
            return Invariant.SLOT_ROTATION
        if any(burst.slot == slot and burst.generation == generation for burst in s.bursts):
            return Invariant.ONE_NAME
        if s.resetting or hand_out.epoch != s.epoch:
            return Invariant.RESET_IS_FINAL
        return None

    # ---- data plane ----------------------------------------------------------------------------------------------

    def data_plane(self, s: State) -> Iterator[Move[State]]:
        """The one thread that submits; it works on the oldest burst until it leaves it."""
        yield from self.data_plane_on(s, s.queue[0])
        if len(s.queue) > 1:
            first, second = s.bursts[s.queue[0]], s.queue[1]
            if not self.keeps(Mechanism.QUEUE_IS_FIFO) and not first.begun:
                yield from self.data_plane_on(s, second)
            if not self.keeps(Mechanism.ONE_BURST_AT_A_TIME) and first.begun:
                yield from self.data_plane_on(s, second)

    def data_plane_on(self, s: State, b: int) -> Iterator[Move[State]]:
        burst = s.bursts[b]
        layer = burst.copied
        if not burst.begun:
            if burst.cancelled and self.keeps(Mechanism.DROP_CANCELLED):
                yield self.step(f"data plane: drops cancelled burst {b}", self.left(s, b))
            else:
                yield self.step(f"data plane: begins burst {b}", self.begun(s, b))
            return
        if burst.failing:
            yield self.step(f"data plane: gives burst {b} up", self.given_up(s, b))
            return
        finish_recorded = self.recorded_by(s, b, self.finish) == b
        if not self.keeps(Mechanism.WATERMARK_AFTER_RECORD) and burst.enqueued == layer < self.num_layers:
            yield self.step(f"data plane: says layer {layer} of burst {b} is enqueued", self.says_enqueued(s, b))
        elif burst.enqueued < layer:
            yield self.step(f"data plane: says layer {layer - 1} of burst {b} is enqueued", self.says_enqueued(s, b))
        elif layer < self.num_layers:
            yield self.step(f"data plane: submits layer {layer} of burst {b}", self.submitted_layer(s, b, layer))
        elif not self.keeps(Mechanism.SUBMITTED_AFTER_FINISH) and not burst.submitted:
            yield self.step(f"data plane: says burst {b} is submitted", self.says_submitted(s, b))
        elif not finish_recorded:
            yield self.step(f"data plane: records the finish event of burst {b}", self.recorded_finish(s, b))
        else:
            yield self.step(f"data plane: leaves burst {b}", self.left(s, b))
        if b in self.scenario.fails and not finish_recorded and not burst.submitted:
            label = f"data plane: fails, {layer} layers of burst {b} submitted and {burst.enqueued} enqueued"
            yield self.step(label, self.failing(s, b), owed=False)

    def begun(self, s: State, b: int) -> State:
        """Takes an event set from the pool, or a new one."""
        if s.pool:
            event_set, s = s.pool[0], s._replace(pool=s.pool[1:])
        else:
            event_set = len(s.event_sets)
            s = s._replace(event_sets=(*s.event_sets, (UNRECORDED,) * (self.num_layers + 1)))
        return s._replace(bursts=put(s.bursts, b, s.bursts[b]._replace(begun=True, event_set=event_set)))

    def submitted_layer(self, s: State, b: int, layer: int) -> State:
        s = self.pushed(self.recorded(s, b, layer), Item(b, copies=True, event=layer))
        return s._replace(bursts=put(s.bursts, b, s.bursts[b]._replace(copied=layer + 1)))

    def recorded_finish(self, s: State, b: int) -> State:
        return self.pushed(self.recorded(s, b, self.finish), Item(b, copies=False, event=self.finish))

    def says_enqueued(self, s: State, b: int) -> State:
        burst = s.bursts[b]
        return s._replace(bursts=put(s.bursts, b, burst._replace(enqueued=burst.enqueued + 1)))

    def says_submitted(self, s: State, b: int) -> State:
        return s._replace(bursts=put(s.bursts, b, s.bursts[b]._replace(submitted=True)))

    def failing(self, s: State, b: int) -> State:
        """Records what is left behind what was submitted, so that the ack, and raw waits, come after the copies."""
        burst = s.bursts[b]
        cut_short = burst.enqueued == burst.copied < self.num_layers
        if self.keeps(Mechanism.FAILURE_RECORDS_LAYERS):
            for layer in range(burst.copied, self.num_layers):
                s = self.recorded(s, b, layer)
        if self.keeps(Mechanism.FAILURE_RECORDS_FINISH):
            s = self.pushed(self.recorded(s, b, self.finish), Item(b, copies=cut_short, event=self.finish))
        else:
            s = self.pushed(s, Item(b, copies=cut_short, event=None))
        return s._replace(bursts=put(s.bursts, b, burst._replace(failing=True)))

    def given_up(self, s: State, b: int) -> State:
        burst = s.bursts[b]._replace(failing=False, failed=True)
        if self.keeps(Mechanism.FAILURE_SAYS_ENQUEUED):
            burst = burst._replace(enqueued=burst.copied)
        return self.left(s._replace(bursts=put(s.bursts, b, burst)), b)

    def left(self, s: State, b: int) -> State:
        queue = tuple(queued for queued in s.queue if queued != b)
        s = self.says_submitted(s, b)._replace(queue=queue)
        event_set = s.bursts[b].event_set
        if event_set is not None and any(record != b for record in s.event_sets[event_set][: self.num_layers]):
            s = s._replace(broken=s.broken or Invariant.OWN_EVENTS)
        return s

    def recorded(self, s: State, b: int, event: int) -> State:
        """The burst's record is now the latest of this event of its event set."""
        event_set = s.bursts[b].event_set
        assert event_set is not None
        return s._replace(event_sets=put(s.event_sets, event_set, put(s.event_sets[event_set], event, b)))

    def pushed(self, s: State, item: Item) -> State:
        """Puts an item on the h2d stream."""
        previous = s.last_on_stream
        if s.bursts[item.burst].cancelled:
            broken = Invariant.CANCEL_IS_CLEAN
        elif item.burst != previous and s.bursts[previous].begun and not s.bursts[previous].submitted:
            broken = Invariant.NO_INTERLEAVING
        elif item.burst < previous or any(queued < item.burst for queued in s.queue):
            broken = Invariant.FIFO_ENQUEUE
        else:
            broken = None
        return s._replace(stream=(*s.stream, item), last_on_stream=item.burst, broken=s.broken or broken)

    # ---- device --------------------------------------------------------------------------------------------------

    def recorded_by(self, s: State, b: int, event: int) -> int:
        event_set = s.bursts[b].event_set
        return UNRECORDED if event_set is None else s.event_sets[event_set][event]

    def complete(self, s: State, b: int, event: int) -> bool:
        """The latest record of an event of the burst's event set has completed; so has one that was never made."""
        return _completed(s, self.recorded_by(s, b, event), event)

    # ---- landing observer ----------------------------------------------------------------------------------------

    def landing_observer(self, s: State) -> Iterator[Move[State]]:
        """Lands the layers of the oldest burst in flight, and ends it."""
        yield from self.lands_and_ends(s, s.in_flight[0])
        if not self.keeps(Mechanism.ACKS_IN_ORDER):
            for b in s.in_flight[1:]:
                yield from self.lands_and_ends(s, b)

    def lands_and_ends(self, s: State, b: int) -> Iterator[Move[State]]:
        burst = s.bursts[b]
        behind = burst.landed < burst.enqueued
        if not self.keeps(Mechanism.LANDED_STAYS_BEHIND_ENQUEUED):
            behind = burst.begun and burst.landed < self.num_layers
        if behind and self.complete(s, b, burst.landed):
            landed = s._replace(bursts=put(s.bursts, b, burst._replace(landed=burst.landed + 1)))
            yield self.step(f"observer: layer {burst.landed} of burst {b} landed", landed)
        if (
            (burst.submitted or not self.keeps(Mechanism.END_LOOKS_AT_SUBMITTED))
            and (burst.landed == burst.enqueued or not self.keeps(Mechanism.END_AFTER_LANDED))
            and (self.complete(s, b, self.finish) or not self.keeps(Mechanism.END_LOOKS_AT_FINISH))
        ):
            yield self.step(f"observer: ends burst {b}", self.ended(s, b))

    def ended(self, s: State, b: int) -> State:
        """Publishes the ack and gives the event set back, unless a waiter holds it: then its last holder does."""
        burst = s.bursts[b]
        stale = burst.failed or burst.cancelled
        has_tokens = not stale or not self.keeps(Mechanism.STALE_ACK_COUNTS_NOTHING)
        broken = s.broken
        if b != s.acked:
            broken = Invariant.FIFO_ACKS
        elif not _over(s, b):
            broken = Invariant.ACK_AFTER_COPIES
        elif burst.landed != burst.enqueued:
            broken = Invariant.LANDED_IN_ORDER
        elif stale and has_tokens:
            broken = Invariant.STALE_ACK_IS_EMPTY
        s = s._replace(
            bursts=put(s.bursts, b, burst._replace(ended=True)),
            in_flight=tuple(other for other in s.in_flight if other != b),
            acks=(*s.acks, b),
            acked=s.acked + 1,
            broken=broken,
        )
        if not self.held(s, b) or not self.keeps(Mechanism.HOLD_KEEPS_EVENT_SET):
            s = self.gives_back(s, b)
        return s

    def held(self, s: State, b: int) -> bool:
        holding = ("looks", "orders") if self.keeps(Mechanism.HOLD_WITH_FIRST_LOOK) else ("orders",)
        return any(waiter.burst == b and waiter.step in holding for waiter in s.waiters)

    def gives_back(self, s: State, b: int) -> State:
        event_set = s.bursts[b].event_set
        if event_set is None or event_set in s.pool:
            return s
        return s._replace(pool=tuple(sorted((*s.pool, event_set))))

    # ---- handles -------------------------------------------------------------------------------------------------

    def handle_cancels(self, s: State) -> Iterator[Move[State]]:
        """`cancel()` succeeds only before the data plane has begun; otherwise it changes nothing."""
        for b in self.scenario.cancels:
            if b >= len(s.bursts):
                continue
            burst = s.bursts[b]
            begun = burst.begun and self.keeps(Mechanism.CANCEL_LOOKS_AT_BEGUN)
            if not (begun or burst.submitted or burst.cancelled):
                cancelled = s._replace(bursts=put(s.bursts, b, burst._replace(cancelled=True)))
                yield self.step(f"handle: cancels burst {b}", cancelled, owed=False)

    def wait_layer(self, s: State, number: int, waiter: Waiter) -> Iterator[Move[State]]:
        """`wait_layer`: look, hold, wait for `enqueued`, order the caller's stream, let go."""
        if waiter.step == "absent":
            for b, layer in self.scenario.waits:
                if b < len(s.bursts):
                    yield self.begins_wait(s, number, b, layer)
        elif waiter.step == "looks":
            yield from self.looks_at_enqueued(s, number, waiter)
        elif waiter.step == "orders":
            b, layer = waiter.burst, waiter.layer
            if not self.keeps(Mechanism.EVENTS_BELONG_TO_BURST):
                b = s.slots[s.bursts[b].slot] or 0
            label = f"waiter: orders its stream behind layer {layer} of burst {waiter.burst}"
            captured = self.recorded_by(s, b, layer)
            after = self.with_waiter(s, number, waiter._replace(step="behind", record=captured))
            if captured > waiter.burst:
                after = after._replace(broken=s.broken or Invariant.NO_STALE_WAIT)
            yield self.step(label, self.gives_back_last(after, waiter.burst))

    def begins_wait(self, s: State, number: int, b: int, layer: int) -> Move[State]:
        burst = s.bursts[b]
        label = f"waiter: begins to wait for layer {layer} of burst {b}"
        if burst.ended or burst.landed > layer:
            return self.step(label + " and returns", self.returned(s, number, b, layer), owed=False)
        return self.step(label, self.with_waiter(s, number, Waiter("looks", b, layer)), owed=False)

    def looks_at_enqueued(self, s: State, number: int, waiter: Waiter) -> Iterator[Move[State]]:
        b, layer = waiter.burst, waiter.layer
        burst = s.bursts[b]
        released = (burst.failed and self.keeps(Mechanism.FAILURE_RELEASES_WAITERS)) or (
            burst.cancelled and self.keeps(Mechanism.CANCEL_RELEASES_WAITERS)
        )
        if burst.enqueued > layer or not self.keeps(Mechanism.WAIT_FOR_ENQUEUED):
            orders = self.with_waiter(s, number, waiter._replace(step="orders"))
            yield self.step(f"waiter: sees layer {layer} of burst {b} enqueued", orders)
        elif released:
            after = self.gives_back_last(self.returned(s, number, b, layer), b)
            yield self.step(f"waiter: returns, layer {layer} of burst {b} will not be enqueued", after)
        if self.scenario.waits_leave:
            after = self.with_waiter(s, number, Waiter("returned"))
            if self.keeps(Mechanism.LEAVING_WAITER_LETS_GO):
                after = self.gives_back_last(after, b)
            yield self.step(f"waiter: leaves layer {layer} of burst {b}, timed out or interrupted", after, owed=False)

    def gives_back_last(self, s: State, b: int) -> State:
        """A waiter that lets go after the burst has ended gives the event set back, if it was the last."""
        keeps = self.keeps(Mechanism.LAST_HOLDER_GIVES_BACK) and self.keeps(Mechanism.HOLD_KEEPS_EVENT_SET)
        if keeps and s.bursts[b].ended and not self.held(s, b):
            s = self.gives_back(s, b)
        return s

    def returned(self, s: State, number: int, b: int, layer: int) -> State:
        """The waiter has returned, or its stream has passed: is it behind its layer's copies?"""
        burst = s.bursts[b]
        copies = Item(b, copies=True, event=layer)
        will_not_be_submitted = burst.ended or burst.failed or burst.cancelled
        if copies in s.stream or not (burst.copied > layer or will_not_be_submitted):
            s = s._replace(broken=s.broken or Invariant.REAL_WAIT)
        return self.with_waiter(s, number, Waiter("returned"))

    def with_waiter(self, s: State, number: int, waiter: Waiter) -> State:
        return s._replace(waiters=put(s.waiters, number, waiter))

    # ---- reset and close -----------------------------------------------------------------------------------------

    def reset(self, s: State) -> Iterator[Move[State]]:
        """Lets nothing more be handed out, drains, then drops what is queued; a timeout changes nothing else."""
        if not s.reset_waits:
            if s.resets_left:
                begun = s._replace(resetting=True, reset_waits=True, resets_left=s.resets_left - 1)
                yield self.step("reset: begins", begun, owed=False)
            return
        if not s.in_flight or not self.keeps(Mechanism.RESET_DRAINS):
            yield self.step("reset: returns", self.reset_done(s))
        timed_out = s._replace(resetting=not self.keeps(Mechanism.RESET_TIMEOUT_LETS_GO), reset_waits=False)
        yield self.step("reset: times out", timed_out, owed=False)

    def reset_done(self, s: State) -> State:
        generations = s.generations if self.keeps(Mechanism.RESET_KEEPS_GENERATIONS) else (0,) * len(s.slots)
        return s._replace(
            resetting=False,
            reset_waits=False,
            epoch=s.epoch + 1,
            ops=0,
            dropped=s.dropped + s.ops,
            acks=() if self.keeps(Mechanism.RESET_CLEARS_ACKS) else s.acks,
            next_slot=0 if self.keeps(Mechanism.RESET_RESTARTS_ROTATION) else s.next_slot,
            generations=generations,
            first_since_reset=len(s.bursts),
        )

    def close(self, s: State) -> Iterator[Move[State]]:
        """Drains, then the scheduler works inline; after a timeout it stays closing until a later close finishes."""
        if not s.close_waits:
            if s.closes_left and s.life != "closed":
                begun = s._replace(life="closing", close_waits=True, closes_left=s.closes_left - 1)
                yield self.step("close: begins", begun, owed=False)
            return
        if not s.in_flight or not self.keeps(Mechanism.CLOSE_DRAINS):
            yield self.step("close: returns", s._replace(life="closed", close_waits=False))
        yield self.step("close: times out", s._replace(close_waits=False), owed=False)

    # ---- one state for all that are alike ------------------------------------------------------------------------

    def settled(self, s: State) -> State:
        """Lets streams pass that may, and forgets what nobody can read any more."""
        for number, waiter in enumerate(s.waiters):
            if waiter.step == "behind" and _completed(s, waiter.record, waiter.layer):
                s = self.returned(s, number, waiter.burst, waiter.layer)
        for b, burst in enumerate(s.bursts):
            if burst.ended and not burst.forgotten and all(waiter.burst != b for waiter in s.waiters):
                over = Burst(burst.slot, burst.generation, submitted=True, ended=True, forgotten=True)
                s = s._replace(bursts=put(s.bursts, b, over))
        if s.pool:
            s = self.without_spare_event_sets(s)
        if len(s.waiters) > 1:
            s = s._replace(waiters=tuple(sorted(s.waiters)))
        return s

    def without_spare_event_sets(self, s: State) -> State:
        """A set in the pool whose records are all complete and that no burst refers to is as good as a new one."""
        owned = {burst.event_set for burst in s.bursts}
        spare = {e for e in s.pool if e not in owned and all(_completed(s, *record) for record in _records(s, e))}
        if not spare:
            return s
        kept = [event_set for event_set in range(len(s.event_sets)) if event_set not in spare]
        number = {event_set: place for place, event_set in enumerate(kept)}
        bursts = [
            burst if burst.event_set is None else burst._replace(event_set=number[burst.event_set])
            for burst in s.bursts
        ]
        return s._replace(
            event_sets=tuple(s.event_sets[event_set] for event_set in kept),
            pool=tuple(number[event_set] for event_set in s.pool if event_set not in spare),
            bursts=tuple(bursts),
        )


def broken(s: State) -> Invariant | None:
    """The invariant that this state, or the step that led to it, breaks."""
    if s.broken is not None:
        return s.broken
    if s.acks and s.acks[0] < s.first_since_reset:
        return Invariant.RESET_IS_FINAL
    if s.loads != s.ops + s.handed_over + s.dropped + (s.hand_out.ops if s.hand_out is not None else 0):
        return Invariant.NO_OP_LOST
    return None


def unfinished(s: State) -> Invariant | None:
    """What is outstanding where no actor has a step left that it would take by itself."""
    waits = any(waiter.step not in ("absent", "returned") for waiter in s.waiters)
    if waits or s.hand_out is not None or s.reset_waits or s.close_waits:
        return Invariant.NOTHING_HANGS
    if s.acked != len(s.bursts) or not all(burst.ended for burst in s.bursts):
        return Invariant.NOTHING_HANGS
    if s.event_sets:
        return Invariant.EVENT_SETS_RETURN
    return None


def put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    """The same tuple with one item replaced."""
    return (*items[:index], item, *items[index + 1 :])


def _completed(s: State, record: int, event: int) -> bool:
    """The device has completed this burst's record of this event."""
    return record < 0 or all(item.burst != record or item.event != event for item in s.stream)


def _over(s: State, b: int) -> bool:
    """Neither the data plane nor the device has anything left to do for the burst's copies."""
    return s.bursts[b].submitted and all(item.burst != b or not item.copies for item in s.stream)


def _records(s: State, event_set: int) -> Iterator[tuple[int, int]]:
    """The latest records of an event set, as (burst, event)."""
    return ((record, event) for event, record in enumerate(s.event_sets[event_set]))


def _named(item: Item) -> str:
    what = "the rest" if item.event is None else f"event {item.event}"
    return f"{'copies and ' if item.copies else ''}{what} of burst {item.burst}"
