"""Explores every reachable state of a small model, breadth first, and gives the shortest trace to a violation.

A model is three functions over hashable states. `moves(state)` gives each atomic step that some actor could take now;
an interleaving is one path through them, so visiting every reachable state covers every interleaving, without walking
each of the paths. `broken(state)` names the invariant that a state breaks. `unfinished(state)` names what is
still outstanding, and is asked only where no *owed* move is left: a move that an actor makes by itself sooner or later
(as against a new call, a fault or a timeout, which may never come). What is outstanding there would hang. States are
kept whole and compared, not only hashed: no two are taken for one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S", bound=Hashable)
DEFAULT_LIMIT = 2_000_000


class Move(NamedTuple, Generic[S]):
    """One atomic step: what happens, the state after it, and whether it must happen sooner or later."""

    label: str
    state: S
    owed: bool = True


@dataclass(frozen=True)
class Violation:
    """An invariant, and the fewest steps from the start to a state that breaks it."""

    invariant: Enum
    trace: tuple[str, ...]

    def __str__(self) -> str:
        steps = "\n".join(f"  {number:2d}. {label}" for number, label in enumerate(self.trace, start=1))
        return f"{self.invariant.name} ({self.invariant.value}) is broken after {len(self.trace)} steps:\n{steps}"


@dataclass(frozen=True)
class Exploration:
    """What was visited; `exhaustive` is False when a violation or the limit ended the search early."""

    states: int
    moves: int
    labels: frozenset[str]
    """Each step that was taken somewhere."""
    exhaustive: bool
    violation: Violation | None


def explore(
    initial: S,
    moves: Callable[[S], Iterable[Move[S]]],
    broken: Callable[[S], Enum | None],
    unfinished: Callable[[S], Enum | None],
    limit: int = DEFAULT_LIMIT,
) -> Exploration:
    """Visit every state reachable from `initial`, or stop at the first violation or after `limit` states."""
    reached_by: dict[S, tuple[S, str] | None] = {initial: None}
    frontier = deque([initial])
    labels: set[str] = set()
    taken = 0

    def result(exhaustive: bool, violation: Violation | None = None) -> Exploration:
        return Exploration(len(reached_by), taken, frozenset(labels), exhaustive, violation)

    if (invariant := broken(initial)) is not None:
        return result(False, Violation(invariant, ()))
    while frontier:
        state = frontier.popleft()
        owes = False
        for label, successor, owed in moves(state):
            taken += 1
            labels.add(label)
            owes = owes or (owed and successor != state)
            known = len(reached_by)
            reached_by.setdefault(successor, (state, label))
            if len(reached_by) == known:
                continue
            if (invariant := broken(successor)) is not None:
                return result(False, Violation(invariant, _trace(reached_by, successor)))
            if len(reached_by) > limit:
                return result(False)
            frontier.append(successor)
        if not owes and (invariant := unfinished(state)) is not None:
            return result(False, Violation(invariant, _trace(reached_by, state)))
    return result(True)


def goes_in_circles(initial: S, moves: Callable[[S], Iterable[Move[S]]]) -> bool:
    """Whether owed moves alone can go on for ever: work that is always under way, and never done."""
    successors: dict[S, list[S]] = {}
    entries: Counter[S] = Counter()
    reached = [initial]
    while reached:
        state = reached.pop()
        if state in successors:
            continue
        taken = list(moves(state))
        successors[state] = [move.state for move in taken if move.owed]
        entries.update(successors[state])
        reached += [move.state for move in taken]
    outermost = [state for state in successors if not entries[state]]
    while outermost:
        state = outermost.pop()
        for successor in successors.pop(state):
            entries[successor] -= 1
            if not entries[successor]:
                outermost.append(successor)
    return bool(successors)


def _trace(reached_by: dict[S, tuple[S, str] | None], state: S) -> tuple[str, ...]:
    labels: list[str] = []
    while (step := reached_by[state]) is not None:
        state, label = step
        labels.append(label)
    return tuple(reversed(labels))
