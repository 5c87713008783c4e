"""The demo's conversations, its checks, and its exit status."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
import typer
from rich.table import Table
from typer.testing import CliRunner

import chat_reload
from chat_engine import smollm2
from chat_engine.audit import Audit
from chat_engine.memory import KvShape, Memory
from chat_engine.metrics import Metrics
from chat_engine.prefix_index import PrefixIndex
from chat_engine.report import Check, checks, replies_table, ways_table
from chat_engine.request import Reply
from chat_engine.ways import Outcome, Settings, Way, run_way
from chat_engine.workload import Turn, load_conversations
from hicache_sched.device import EmulatedDevice
from tests.chat_engine.builders import PAGE_SIZE, TOKENS_PER_NODE, VOCABULARY, answer


class Letters:
    """A tokenizer for which a token is a letter, and that cuts a chat off."""

    eos_token_id = 0

    def __init__(self, longest_prompt: int = 40) -> None:
        self._longest_prompt = longest_prompt

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> dict[str, list[int]]:
        text = "\n".join(message["content"] for message in messages)
        # The beginning is what turns share; how many messages there were tells them apart.
        return {"input_ids": [ord(letter) % VOCABULARY for letter in text[: self._longest_prompt]] + [len(messages)]}

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(65 + token % 26) for token in tokens)


SETTINGS = Settings(
    device_tokens=56,
    host_tokens=512,
    link_speed=1e9,
    max_new_tokens=4,
    max_running=2,
    page_size=PAGE_SIZE,
    tokens_per_node=TOKENS_PER_NODE,
)


@pytest.fixture
def quiet() -> Iterator[None]:
    """The demo configures structlog for its process; put that back."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


# -- conversations --------------------------------------------------------------------------------------------------


def test_the_shipped_conversations_share_few_system_prompts() -> None:
    conversations = load_conversations(6, 5)
    assert [len(conversation.turns) for conversation in conversations] == [5] * 6
    assert len({conversation.system for conversation in conversations}) == 3


def test_more_conversations_than_are_shipped_differ_from_the_first_turn_on() -> None:
    conversations = load_conversations(14, 2)
    assert len({conversation.turns[0] for conversation in conversations}) == 14


async def test_a_conversation_sends_everything_said_before(model: Any) -> None:
    tokenizer = Letters(longest_prompt=10_000)
    sent: list[int] = []
    settings = dataclasses.replace(SETTINGS, device_tokens=8_192)
    outcome = await run_way(
        Way.RECOMPUTE,
        model,
        tokenizer,
        load_conversations(1, 3),
        settings,
        Audit(),
        lambda turn: sent.append(turn.number),
    )
    assert sent == [1, 2, 3]
    for before, after in zip(outcome.turns, outcome.turns[1:], strict=False):
        said = [ord(letter) % VOCABULARY for letter in before.text]
        assert list(after.prompt[: len(before.prompt) - 1]) == list(before.prompt[:-1])
        assert list(after.prompt[len(before.prompt) : len(before.prompt) + len(said)]) == said


# -- checks ---------------------------------------------------------------------------------------------------------


async def run_ways(model: Any, fail_burst: int | None = None) -> tuple[list[Outcome], Audit]:
    audit = Audit()
    settings = dataclasses.replace(SETTINGS, fail_burst=fail_burst)
    chats = load_conversations(6, 3)
    return [await run_way(way, model, Letters(), chats, settings, audit) for way in Way], audit


@pytest.mark.parametrize("fail_burst", [None, 2])
async def test_every_check_passes_on_a_real_run(model: Any, fail_burst: int | None) -> None:
    outcomes, audit = await run_ways(model, fail_burst)
    plain = answer(model, outcomes[0].turns[2].prompt, SETTINGS.max_new_tokens)
    assert [check.problem for check in checks(outcomes, audit, plain, fail_burst)] == [None] * 6
    recomputed, *reloaded = (outcome.compared_loaded for outcome in outcomes)
    assert recomputed == 0
    assert sum(reloaded) == audit.compared_loaded < audit.compared


PLAIN_REPLY = [3, 4]


def an_outcome(
    way: Way, *, reply: Sequence[int] = PLAIN_REPLY, leaks: Sequence[str] = (), compared: int = 3, **metrics: Any
) -> Outcome:
    """A way in which all went well, but for what is said."""
    turn = Turn(1, 1, [1, 2], Reply(list(reply), False, 0.5), "CD")
    usual: dict[str, Any] = {"ttfts": [0.5]}
    if way is not Way.RECOMPUTE:
        usual |= {"reloaded_tokens": 8, "hand_outs": [1e-4], "copy_ms": 2.0}
    return Outcome(way, [turn], Metrics(**(usual | metrics)), leaks, compared, 1.0)


WRONG_ASYNC: dict[str, dict[str, Any]] = {
    "the same tokens in all ways": {"reply": [3, 5]},
    "prefixes were reloaded": {"reloaded_tokens": 0},
    "reloaded keys and values equal to those first computed, byte by byte (3 and 0 comparisons)": {"compared": 0},
    "no page leaked": {"leaks": ["node 1 is still in use"]},
    "no reload failed": {"stale_bursts": [4]},
}


@pytest.mark.parametrize("what", WRONG_ASYNC)
def test_each_check_fails_when_one_way_is_wrong(what: str) -> None:
    outcomes = [an_outcome(Way.RECOMPUTE), an_outcome(Way.INLINE), an_outcome(Way.ASYNC, **WRONG_ASYNC[what])]
    assert failed(checks(outcomes, Audit(), PLAIN_REPLY, None)) == [what]


def test_a_check_fails_when_all_ways_are_wrong_in_the_same_way() -> None:
    outcomes = [an_outcome(way, reply=[3, 5]) for way in Way]
    (what,) = failed(checks(outcomes, Audit(), PLAIN_REPLY, None))
    assert what.startswith("those of turn 1 of chat 1 are what transformers generates")


def test_a_check_fails_when_the_audit_saw_a_difference() -> None:
    audit = Audit()
    audit.differing.append(5)
    (check,) = [check for check in checks([an_outcome(way) for way in Way], audit, PLAIN_REPLY, None) if check.problem]
    assert check.problem == "node 5 differs"


@pytest.mark.parametrize("stale_bursts", [[], [1], [1, 2]])
def test_a_check_fails_when_not_just_the_reload_failed_that_was_to(stale_bursts: list[int]) -> None:
    outcomes = [an_outcome(Way.RECOMPUTE), *(an_outcome(way, stale_bursts=[2]) for way in (Way.INLINE, Way.ASYNC))]
    assert failed(checks(outcomes, Audit(), PLAIN_REPLY, 2)) == []
    outcomes[2] = an_outcome(Way.ASYNC, stale_bursts=stale_bursts)
    assert failed(checks(outcomes, Audit(), PLAIN_REPLY, 2)) == ["reload 2 failed, and no other"]


def failed(checked: Sequence[Check]) -> list[str]:
    return [check.what for check in checked if check.problem is not None]


async def test_the_audit_sees_a_byte_that_changed(device: EmulatedDevice) -> None:
    memory = Memory(KvShape(2, 1, 2, torch.float32), PAGE_SIZE, device_pages=4, host_pages=0, runtime=device)
    node = PrefixIndex(TOKENS_PER_NODE).add(b"key", None)
    node.device_pages = [3, 1]
    audit = Audit()
    keys, _ = memory.device_pool.planes
    await audit.look_at([node], memory)
    keys[0, 2] += 1  # of page 0
    await audit.look_at([node], memory)
    assert (audit.compared, audit.differing) == (1, [])
    keys[1, 5] += 1  # of page 1
    await audit.look_at([node], memory)
    assert (audit.compared, audit.differing) == (2, [node.id])


def shown(table: Table) -> list[list[str]]:
    """The cells of a table, row by row."""
    return [list(cells) for cells in zip(*(column.cells for column in table.columns), strict=True)]


def test_replies_are_shown_turn_by_turn_with_a_mark_where_they_were_cut() -> None:
    outcome = an_outcome(Way.ASYNC)
    whole = dataclasses.replace(outcome.turns[0], number=2, prompt=[1] * 1234, reply=Reply([3], True, 0.5))
    outcome = dataclasses.replace(outcome, turns=[*outcome.turns, whole])
    assert shown(replies_table(outcome)) == [["1", "1", "2 tokens", "CD ..."], ["1", "2", "1,234 tokens", "CD"]]


def test_each_number_is_what_its_label_says() -> None:
    metrics: dict[str, Any] = {
        "ttfts": [number / 100 for number in range(101)],
        "hand_outs": [0.001, 0.002, 0.006],
        "computed_tokens": 1111,
        "reloaded_tokens": 2222,
        "reloaded_bytes": 3_300_000,
        "copy_ms": 40.0,
        "waited_ms": 10.0,
    }
    table = ways_table([an_outcome(Way.RECOMPUTE), an_outcome(Way.ASYNC, **metrics)])
    assert [column.header for column in table.columns] == ["", "recompute", "reload async"]
    assert {label: value for label, _, value in shown(table)} == {
        "first token after, mean": "0.50 s",
        "p50": "0.50 s",
        "p95": "0.95 s",
        "all requests": "1.00 s",
        "prompt tokens computed": "1,111",
        "prompt tokens reloaded": "2,222",
        "bytes reloaded": "3 MB",
        "reloads": "3",
        "blocked in hand-outs": "9.0 ms",
        "blocked in each, mean": "3.00 ms",
        "copy time hidden": "75.0%",
    }
    assert [value for label, value, _ in shown(table) if label in ("blocked in each, mean", "copy time hidden")] == [
        "-",
        "-",
    ]


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def run_demo(model: Any, monkeypatch: pytest.MonkeyPatch, quiet: None) -> Callable[..., Any]:
    """Runs the demo's command on the tiny model."""
    monkeypatch.setattr(smollm2, "load", lambda cache_dir: (model, Letters()))
    monkeypatch.setattr(
        chat_reload, "Settings", lambda **given: dataclasses.replace(SETTINGS, fail_burst=given["fail_burst"])
    )
    app = typer.Typer()
    app.command()(chat_reload.main)
    return lambda *arguments: CliRunner().invoke(app, ["--turns", "3", *arguments])


def test_the_command_shows_replies_ways_and_checks_and_succeeds(run_demo: Callable[..., Any]) -> None:
    result = run_demo()
    assert result.exit_code == 0, result.output
    assert "FAILED" not in result.output
    assert result.output.count("ok ") == 6


def test_the_command_shows_which_nodes_a_failed_reload_left_stale(run_demo: Callable[..., Any]) -> None:
    result = run_demo("--fail-burst", "2")
    assert result.exit_code == 0, result.output
    assert result.output.count("burst_failed") == 2, "once inline, once async"
    assert "node_ids=[" in result.output
    assert "reload 2 failed, and no other" in result.output


def test_the_command_fails_when_a_check_does(run_demo: Callable[..., Any]) -> None:
    result = run_demo("--fail-burst", "1000")
    assert result.exit_code == 1
    assert "FAILED  reload 1000 failed, and no other" in result.output
    assert "reload async: of" in result.output


def test_a_device_pool_that_no_prompt_fits_is_a_wrong_option(
    run_demo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_reload, "Settings", lambda **given: dataclasses.replace(SETTINGS, device_tokens=32))
    result = run_demo()
    assert result.exit_code == 2
    assert "--device-tokens" in result.output
    assert "needs more pages" in " ".join(result.output.split())


def test_a_model_that_is_not_installed_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "llm-not-there")
    with pytest.raises(SystemExit, match="make demo"):
        smollm2.load(tmp_path)
