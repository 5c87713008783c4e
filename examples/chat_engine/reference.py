"""What the model says on its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import DynamicCache


@torch.inference_mode()
def plain_reply(
    model: Any, prompt: Sequence[int], max_new_tokens: int, *, chunk: int, eos_token_ids: Collection[int] = ()
) -> list[int]:
    """The reply to a prompt, computed by `transformers` alone: no engine, no pages, nothing evicted or reloaded.

    :param chunk: tokens of the prompt that go through the model at once. What is rounded depends on it, so it has to
        be the engine's.
    """
    cache = DynamicCache()

    def next_token(tokens: Sequence[int]) -> int:
        logits = model(torch.tensor([tokens], device=model.device), cache=cache, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())

    for begin in range(0, len(prompt), chunk):
        token = next_token(prompt[begin : begin + chunk])
    reply: list[int] = []
    while token not in eos_token_ids:
        reply.append(token)
        if len(reply) == max_new_tokens:
            break
        token = next_token([token])
    return reply
