"""The demo's conversations, its checks, and its exit status."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

import chat_reload
from chat_engine import smollm2
from chat_engine.audit import Audit
from chat_engine.memory import KvShape, Memory
from chat_engine.metrics import Metrics
from chat_engine.prefix_index import PrefixIndex
from chat_engine.report import checks, replies_table, ways_table
from chat_engine.request import Reply
from chat_engine.ways import Outcome, Settings, Way, run_way
from chat_engine.workload import Turn, load_conversations
from hicache_sched.device import EmulatedDevice
from tests.chat_engine.builders import PAGE_SIZE, TOKENS_PER_NODE, VOCABULARY


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
    yield
    structlog.reset_defaults()


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
    assert [check.problem for check in checks(outcomes, audit, fail_burst)] == [None] * 5


def an_outcome(way: Way, **metrics: Any) -> Outcome:
    turn = Turn(1, 1, [1, 2], Reply([3, 4], False, 0.5), "CD")
    usual: dict[str, Any] = {"ttfts": [0.5]}
    if way is not Way.RECOMPUTE:
        usual |= {"reloaded_tokens": 8, "hand_outs": [1e-4], "copy_ms": 2.0}
    return Outcome(way, [turn], Metrics(**(usual | metrics)), [], 1.0)


def an_audit(compared: int = 3, differing: tuple[int, ...] = ()) -> Audit:
    audit = Audit()
    audit.compared, audit.differing = compared, list(differing)
    return audit


def another_reply(outcome: Outcome) -> Outcome:
    (turn,) = outcome.turns
    return dataclasses.replace(outcome, turns=[dataclasses.replace(turn, reply=Reply([3, 5], False, 0.5))])


WRONG: dict[str, tuple[Callable[[list[Outcome]], list[Outcome]], Audit, int | None]] = {
    "the same tokens in all ways": (lambda ways: [*ways[:2], another_reply(ways[2])], an_audit(), None),
    "prefixes were reloaded": (lambda ways: [*ways[:2], an_outcome(Way.ASYNC, reloaded_tokens=0)], an_audit(), None),
    "keys and values equal to those first computed, byte by byte (3 comparisons)": (
        lambda ways: ways,
        an_audit(differing=(5,)),
        None,
    ),
    "keys and values equal to those first computed, byte by byte (0 comparisons)": (
        lambda ways: ways,
        an_audit(compared=0),
        None,
    ),
    "no page leaked": (lambda ways: [*ways[:2], dataclasses.replace(ways[2], leaks=["node 1 is still in use"])],
                       an_audit(), None),
    "no reload failed": (lambda ways: [*ways[:2], an_outcome(Way.ASYNC, stale_bursts=1)], an_audit(), None),
    "reload 9 failed, and no other": (lambda ways: ways, an_audit(), 9),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_each_check_fails_when_what_it_checks_is_wrong(what: str) -> None:
    spoil, audit, fail_burst = WRONG[what]
    outcomes = spoil([an_outcome(way) for way in Way])
    assert [check.what for check in checks(outcomes, audit, fail_burst) if check.problem is not None] == [what]


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


def test_tables_show_every_turn_and_every_way() -> None:
    outcomes = [an_outcome(way) for way in Way]
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(replies_table(outcomes[0]), ways_table(outcomes))
    text = console.export_text()
    assert "CD ..." in text
    assert all(way in text for way in Way)
    assert "100.0%" in text


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
    assert result.output.count("ok ") == 5


def test_the_command_shows_which_nodes_a_failed_reload_left_stale(run_demo: Callable[..., Any]) -> None:
    result = run_demo("--fail-burst", "2")
    assert result.exit_code == 0, result.output
    assert result.output.count("burst_failed") == 2, "once inline, once async"
    assert "node_ids=[" in result.output
    assert "reload 2 failed, and no other" in result.output


def test_the_command_fails_when_a_check_does(run_demo: Callable[..., Any]) -> None:
    result = run_demo("--fail-burst", "1000")
    assert result.exit_code == 1
    assert "FAILED" in result.output


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
