"""A `transformers` model generates while the KV cache of its prompt is still being loaded, layer by layer."""

from __future__ import annotations

import logging
from typing import Any

import structlog
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hicache_sched import LoadOp, TransferScheduler
from hicache_sched.copy import PooledBackend
from hicache_sched.integrations.transformers import PagedCache
from hicache_sched.pools import Pool, PoolPair

PAGE_SIZE, NUM_LAYERS, NUM_HEADS, HEAD_DIM = 16, 8, 2, 16
PREFIX_PAGES, REST_PAGES = [9, 4, 7], [1, 2]


def make_model() -> Any:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=256,
    )
    model: Any = LlamaForCausalLM(config)
    return model.eval()


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # only the prints
    torch.manual_seed(0)
    model = make_model()
    where = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(where)
    shape = (PAGE_SIZE, NUM_LAYERS, NUM_HEADS, HEAD_DIM, torch.float32)
    host, device = Pool.mha(32, *shape), Pool.mha(16, *shape, device=where)
    prompt = torch.randint(1, 256, (1, len(PREFIX_PAGES) * PAGE_SIZE + 5), device=where)  # 0 is for padding
    prefix = prompt[:, : len(PREFIX_PAGES) * PAGE_SIZE]

    # Some time ago the prefix was computed, and evicted to pages 0, 1 and 2 of the host.
    with torch.inference_mode():
        model(prefix, cache=PagedCache(device, PREFIX_PAGES))
    on_host = torch.arange(prefix.shape[1])
    on_device = (torch.tensor(PREFIX_PAGES)[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()
    for host_plane, device_plane in zip(host.planes, device.planes, strict=True):
        host_plane[:, on_host] = device_plane[:, on_device].cpu()
        device_plane.fill_(torch.nan)

    with TransferScheduler(PooledBackend([PoolPair("kv", host, device)])) as scheduler:
        scheduler.load(LoadOp(1, on_host, on_device))
        handle = scheduler.start_loading_sync()
        assert handle is not None
        cache = PagedCache(device, PREFIX_PAGES + REST_PAGES, num_tokens=prefix.shape[1], loads=[handle])
        reply = model.generate(prompt, cache=cache, max_new_tokens=12, do_sample=False, pad_token_id=0)
        print(f"{handle.result().num_tokens} of {prompt.shape[1]} prompt tokens were loaded, the others computed")

    print("reply:", reply[0, prompt.shape[1] :].tolist())
    assert torch.equal(reply, model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0))
    print("as it is without a cache of ours")


if __name__ == "__main__":
    main()
