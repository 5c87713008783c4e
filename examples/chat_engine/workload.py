"""Conversations, and the clients that hold them."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .engine import Engine
from .request import Reply

TEXTS = Path(__file__).with_name("conversations.toml")


@dataclass(frozen=True)
class Conversation:
    """What a user says, turn by turn, to an assistant with a system prompt."""

    system: str
    turns: Sequence[str]


@dataclass(frozen=True)
class Turn:
    """One turn as it went.

    Attributes:
        conversation: its number, from 1.
        number: which turn of it, from 1.
        prompt: tokens that were sent.
        reply: what came back.
        text: the same as text.
    """

    conversation: int
    number: int
    prompt: Sequence[int]
    reply: Reply
    text: str


def load_conversations(count: int, num_turns: int) -> list[Conversation]:
    """The shipped conversations, in order; where more are asked for, they come again with another first line.

    :param count: conversations.
    :param num_turns: turns of each at most.
    """
    texts = tomllib.loads(TEXTS.read_text(encoding="utf-8"))
    systems = {system["name"]: system["text"].strip() for system in texts["system"]}
    shipped = texts["conversation"]
    conversations = []
    for number in range(count):
        text = shipped[number % len(shipped)]
        turns = [turn.strip() for turn in text["turns"][:num_turns]]
        if number >= len(shipped):
            turns[0] = f"This is visit number {number // len(shipped) + 1}.\n{turns[0]}"
        conversations.append(Conversation(systems[text["system"]], turns))
    return conversations


async def hold_conversations(
    engine: Engine,
    tokenizer: Any,
    conversations: Sequence[Conversation],
    max_new_tokens: int,
    on_turn: Callable[[Turn], object] = lambda turn: None,
) -> list[Turn]:
    """Hold all conversations at once, each as a client that sends its next turn when the last was answered."""

    async def hold(number: int, conversation: Conversation) -> list[Turn]:
        messages = [{"role": "system", "content": conversation.system}]
        turns: list[Turn] = []
        for message in conversation.turns:
            messages.append({"role": "user", "content": message})
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
            reply = await engine.generate(prompt, max_new_tokens)
            text = tokenizer.decode(reply.tokens)
            messages.append({"role": "assistant", "content": text})
            turns.append(Turn(number, len(turns) + 1, prompt, reply, text))
            on_turn(turns[-1])
        return turns

    held = await asyncio.gather(*(hold(number, chat) for number, chat in enumerate(conversations, 1)))
    return [turn for turns in held for turn in turns]
