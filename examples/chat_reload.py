"""Real chats with a real model, whose KV cache does not fit the device: recomputed, reloaded inline, reloaded async."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import structlog
import torch
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from chat_engine import report, smollm2
from chat_engine.audit import Audit
from chat_engine.engine import PromptTooLongError
from chat_engine.reference import plain_reply
from chat_engine.ways import Outcome, Settings, Way, run_way
from chat_engine.workload import Conversation, Turn, load_conversations

CACHE_DIR = Path(__file__).parents[1] / ".model-cache"
"""Where the unpacked model is kept; `make clean` removes it."""


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a minute's worth of less of everything")] = False,
    conversations: Annotated[int | None, typer.Option(min=1, help="conversations, all at once [6, quick: 4]")] = None,
    turns: Annotated[int | None, typer.Option(min=1, max=5, help="turns of each [5, quick: 3]")] = None,
    device_tokens: Annotated[
        int | None, typer.Option(min=128, help="tokens that the device pool holds [3072, quick: 1536]")
    ] = None,
    host_tokens: Annotated[int, typer.Option(min=128, help="tokens that the host pool holds")] = 16_384,
    link_speed: Annotated[float, typer.Option(min=1e-3, help="emulated GB/s between host and device")] = 0.5,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="tokens of a reply at most [16, quick: 12]")] = None,
    fail_burst: Annotated[int | None, typer.Option(min=1, help="make this reload fail half way")] = None,
    model_cache: Annotated[Path, typer.Option(help="where the unpacked model is kept")] = CACHE_DIR,
) -> None:
    """Serve multi-turn chats three ways, and compare.

    Exits with 1 if a check fails: the replies and the bytes of the KV cache have to be the same in each way, something
    has to be reloaded, no page may leak, and no reload fail but the one that was made to.
    """
    console = Console()
    settings = Settings(
        device_tokens=device_tokens or (1_536 if quick else 3_072),
        host_tokens=host_tokens,
        link_speed=link_speed * 1e9,
        max_new_tokens=max_new_tokens or (12 if quick else 16),
        fail_burst=fail_burst,
    )
    chats = load_conversations(conversations or (4 if quick else 6), turns or (3 if quick else 5))
    _log_to(console)
    with console.status("loading the model (the first time takes half a minute)"):
        model, tokenizer = smollm2.load(model_cache)
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")

    audit = Audit()
    try:
        outcomes = asyncio.run(_run_ways(console, model, tokenizer, chats, settings, audit))
    except PromptTooLongError as exc:
        raise typer.BadParameter(f"{exc}", param_hint="--device-tokens or --max-new-tokens") from None

    console.print(report.replies_table(outcomes[-1]))
    console.print(report.ways_table(outcomes))
    with console.status("asking the model alone"):
        reply = plain_reply(
            model,
            outcomes[0].end_of_chat_1.prompt,
            settings.max_new_tokens,
            chunk=settings.tokens_per_node,
            eos_token_ids=[tokenizer.eos_token_id],
        )
    checks = report.checks(outcomes, audit, reply, fail_burst)
    for check in checks:
        console.print(f"[green]ok[/]      {check.what}" if check.problem is None else f"[red]FAILED[/]  {check.what}")
        if check.problem is not None:
            console.print(f"        {check.problem}", markup=False)
    raise typer.Exit(any(check.problem is not None for check in checks))


async def _run_ways(
    console: Console,
    model: object,
    tokenizer: object,
    chats: list[Conversation],
    settings: Settings,
    audit: Audit,
) -> list[Outcome]:
    outcomes = []
    columns = TextColumn("{task.description:14}"), MofNCompleteColumn(), TextColumn("replies"), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        for way in Way:
            task = progress.add_task(way, total=sum(len(chat.turns) for chat in chats))

            def advance(_: Turn, task: TaskID = task) -> None:
                progress.advance(task)

            outcomes.append(await run_way(way, model, tokenizer, chats, settings, audit, advance))
    return outcomes


def _log_to(console: Console) -> None:
    """Logs as lines, above the progress; of an exception, what it says."""

    def shorten(logger: object, method: str, entry: structlog.types.EventDict) -> structlog.types.EventDict:
        if (error := entry.pop("exc_info", None)) is not None:
            entry["error"] = repr(error)
        return entry

    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            shorten,
            structlog.dev.ConsoleRenderer(colors=console.is_terminal),
        ],
        wrapper_class=structlog.make_filtering_bound_logger("info"),
    )


if __name__ == "__main__":
    typer.run(main)
