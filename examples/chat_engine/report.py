"""What the demo shows: progress, replies, the table of the ways, and whether all is well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from .audit import Audit
from .ways import Outcome, Way


@dataclass(frozen=True)
class Check:
    """Something that has to be so.

    Attributes:
        what: what has to be so.
        problem: what is not, None if all is well.
    """

    what: str
    problem: str | None


def checks(
    outcomes: Sequence[Outcome], audit: Audit, plain_reply: Sequence[int], fail_burst: int | None
) -> list[Check]:
    """Everything that has to be so after the ways have run.

    :param audit: what watched all of them.
    :param plain_reply: what the model says on its own in the last turn of the first conversation.
    :param fail_burst: number of the reload that was made to fail, if one was.
    """
    first, *others = outcomes
    different = [
        f"{other.way}: conversation {theirs.conversation}, turn {theirs.number}"
        for other in others
        for ours, theirs in zip(first.turns, other.turns, strict=True)
        if (ours.prompt, ours.reply.tokens) != (theirs.prompt, theirs.reply.tokens)
    ]
    compared = first.end_of_chat_1
    reloads = [outcome for outcome in outcomes if outcome.way is not Way.RECOMPUTE]
    expected_stale = [] if fail_burst is None else [fail_burst]
    return [
        _check("the same tokens in all ways", different),
        _check(
            f"those of turn {compared.number} of chat 1 are what transformers generates without engine and reloads",
            [] if compared.reply.tokens == plain_reply else [f"it generates {plain_reply}"],
        ),
        _check(
            "prefixes were reloaded",
            [
                f"{outcome.way}: none; evict more (smaller device pool) and keep it (larger host pool)"
                for outcome in reloads
                if not outcome.metrics.reloaded_tokens
            ],
        ),
        _check(
            "reloaded keys and values equal to those first computed, byte by byte "
            f"({' and '.join(str(outcome.compared_loaded) for outcome in reloads)} comparisons)",
            [f"node {node} differs" for node in audit.differing]
            + [f"{outcome.way}: nothing was compared" for outcome in reloads if not outcome.compared_loaded],
        ),
        _check("no page leaked", [f"{outcome.way}: {leak}" for outcome in outcomes for leak in outcome.leaks]),
        _check(
            "no reload failed" if fail_burst is None else f"reload {fail_burst} failed, and no other",
            [
                f"{outcome.way}: of {len(outcome.metrics.hand_outs)} reloads failed {outcome.metrics.stale_bursts}"
                for outcome in reloads
                if outcome.metrics.stale_bursts != expected_stale
            ],
        ),
    ]


def _check(what: str, problems: Sequence[str]) -> Check:
    return Check(what, "; ".join(problems) or None)


def replies_table(outcome: Outcome) -> Table:
    """What the assistant said in each turn."""
    table = Table(title="Replies", title_justify="left")
    for name in ("chat", "turn", "prompt"):
        table.add_column(name, justify="right")
    table.add_column("reply", overflow="fold")
    for turn in outcome.turns:
        text = " ".join(turn.text.split()) + ("" if turn.reply.is_whole else " ...")
        table.add_row(str(turn.conversation), str(turn.number), f"{len(turn.prompt):,} tokens", text)
    return table


def ways_table(outcomes: Sequence[Outcome]) -> Table:
    """The ways beside each other."""
    table = Table(title="Three ways", title_justify="left")
    table.add_column("")
    for outcome in outcomes:
        table.add_column(outcome.way, justify="right")
    rows: list[tuple[str, Callable[[Outcome], str]]] = [
        ("first token after, mean", lambda outcome: _seconds(np.mean(outcome.metrics.ttfts))),
        ("p50", lambda outcome: _seconds(np.percentile(outcome.metrics.ttfts, 50))),
        ("p95", lambda outcome: _seconds(np.percentile(outcome.metrics.ttfts, 95))),
        ("all requests", lambda outcome: _seconds(outcome.seconds)),
        ("prompt tokens computed", lambda outcome: f"{outcome.metrics.computed_tokens:,}"),
        ("prompt tokens reloaded", lambda outcome: f"{outcome.metrics.reloaded_tokens:,}"),
        ("bytes reloaded", lambda outcome: f"{outcome.metrics.reloaded_bytes / 1e6:,.0f} MB"),
        ("reloads", lambda outcome: str(len(outcome.metrics.hand_outs))),
        ("blocked in hand-outs", lambda outcome: f"{sum(outcome.metrics.hand_outs) * 1e3:.1f} ms"),
        ("blocked in each, mean", _hand_out),
        ("copy time hidden", _hidden),
    ]
    for name, value in rows:
        table.add_row(name, *map(value, outcomes))
    return table


def _seconds(value: Any) -> str:
    return f"{value:.2f} s"


def _hand_out(outcome: Outcome) -> str:
    hand_outs = outcome.metrics.hand_outs
    return f"{np.mean(hand_outs) * 1e3:.2f} ms" if hand_outs else "-"


def _hidden(outcome: Outcome) -> str:
    share = outcome.metrics.hidden_share
    return "-" if share is None else f"{share:.1%}"
