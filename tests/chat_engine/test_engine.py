"""The engine gives the model's own answers, whatever happens to the KV cache underneath."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chat_engine.audit import Audit
from chat_engine.engine import Engine, EngineClosedError, PromptTooLongError
from chat_engine.memory import KvShape, Memory
from chat_engine.reload import Reload
from hicache_sched.device import EmulatedDevice
from tests.chat_engine.builders import TOKENS_PER_NODE, VOCABULARY, Mode, Served, WatchedModel, answer, prompt_of, serve

WAYS: list[Mode | None] = [None, "inline", "async"]
RELOADS: list[Mode] = ["inline", "async"]


async def hold_chats(served: Served, model: Any) -> None:
    """Three chats of four turns at once, far too much for the device; all answers have to be right."""

    async def chat(seed: int) -> None:
        for num_tokens in (13, 25, 37, 50):
            prompt = prompt_of(seed, num_tokens)
            assert (await served.engine.generate(prompt, 4)).tokens == answer(model, prompt, 4)

    await asyncio.gather(*map(chat, range(3)))


async def until(condition: Callable[[], bool]) -> None:
    """For what no asyncio event tells."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


def waits_for_the_evict_stream(calls: Sequence[tuple[Any, ...]]) -> bool:
    """Whether the model thread has come to where it waits for evictions."""
    return any(call == "wait_stream" for call, *_ in calls)


# -- the same tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", WAYS)
async def test_chats_get_the_models_own_answers(model: Any, mode: Mode | None) -> None:
    async with serve(model, mode=mode) as served:
        await hold_chats(served, model)
        assert (served.engine.metrics.reloaded_tokens > 0) == (mode is not None)


@pytest.mark.parametrize("mode", RELOADS)
async def test_what_is_reloaded_is_not_computed_again(model: Any, mode: Mode) -> None:
    prompt = prompt_of(1, 4 * TOKENS_PER_NODE + 3)
    async with serve(model, mode=mode) as served:
        await served.ask_and_evict(prompt)
        computed = served.engine.metrics.computed_tokens
        await served.ask(prompt)
        assert served.engine.metrics.reloaded_tokens == 4 * TOKENS_PER_NODE
        assert served.engine.metrics.computed_tokens - computed == 3


@pytest.mark.parametrize("mode", RELOADS)
async def test_reloaded_keys_and_values_are_those_first_computed(model: Any, mode: Mode) -> None:
    audit = Audit()
    async with serve(model, mode=None, device_tokens=256, audit=audit) as served:
        await hold_chats(served, model)
    first_looks = audit.compared
    async with serve(model, mode=mode, audit=audit) as served:
        await hold_chats(served, model)
        assert served.engine.metrics.reloaded_tokens > 0
    assert audit.compared > first_looks
    assert audit.differing == []


async def test_a_reply_ends_with_the_token_that_ends_it(model: Any) -> None:
    prompt = prompt_of(1, 20)
    said = answer(model, prompt, 8)
    end = next(token for token in said if said.index(token) > 0)
    async with serve(model, eos_token_ids=[end]) as served:
        reply = await served.engine.generate(prompt, 8)
        assert reply.tokens == said[: said.index(end)]
        assert reply.is_whole
        assert not (await served.engine.generate(prompt, 1)).is_whole


async def test_a_prefix_outlives_a_host_pool_that_is_too_small_for_all(model: Any) -> None:
    async with serve(model, host_tokens=5 * TOKENS_PER_NODE) as served:
        await hold_chats(served, model)


async def test_a_host_pool_smaller_than_a_node_is_of_no_use_but_does_no_harm(model: Any) -> None:
    async with serve(model, host_tokens=TOKENS_PER_NODE // 2) as served:
        await hold_chats(served, model)
        assert served.engine.metrics.reloaded_tokens == 0


# -- room -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", WAYS)
async def test_requests_wait_where_the_pool_has_room_for_one(model: Any, mode: Mode | None) -> None:
    async with serve(model, mode=mode, device_tokens=56) as served:
        await hold_chats(served, model)
        assert served.engine.metrics.waits_for_room > 0


async def test_requests_are_admitted_in_the_order_they_came(model: Any) -> None:
    finished: list[asyncio.Task[list[int]]] = []
    async with serve(model, device_tokens=56) as served:
        clients = [served.ask(prompt_of(seed, size)) for seed, size in ((1, 50), (2, 50), (3, 9))]
        for client in clients:
            client.add_done_callback(finished.append)
        await asyncio.gather(*clients)
    assert finished == clients


async def test_two_requests_compute_a_shared_prefix_once(model: Any) -> None:
    prompts = [prompt_of(1, 24) + prompt_of(seed, 5) for seed in (2, 3)]
    async with serve(model) as served:
        assert await asyncio.gather(*map(served.ask, prompts)) == [answer(model, prompt, 4) for prompt in prompts]
        assert served.engine.metrics.computed_tokens == 24 + 5 + 5


@pytest.mark.parametrize(("max_batch_tokens", "first_chunks"), [(8, [1, 1, 1, 2, 2, 2]), (16, [1, 2, 1, 2, 1, 2])])
async def test_a_batch_has_no_more_tokens_than_it_may(
    model: Any, max_batch_tokens: int, first_chunks: list[int]
) -> None:
    watched_model = WatchedModel(model)
    async with serve(watched_model, max_batch_tokens=max_batch_tokens) as served:
        await asyncio.gather(*(served.ask(prompt_of(seed, 24), 1) for seed in (1, 2)))
    seed_of = {
        token: seed for seed in (2, 1) for token in [tuple(prompt_of(seed, 24)[at : at + 8]) for at in (0, 8, 16)]
    }
    assert [seed_of[tuple(tokens)] for tokens in watched_model.forwards] == first_chunks


# -- sharing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", RELOADS)
async def test_two_conversations_reload_a_shared_prefix_once(model: Any, mode: Mode) -> None:
    shared = prompt_of(1, 24)
    prompts = [shared + prompt_of(seed, 5) for seed in (2, 3)]
    async with serve(model, mode=mode) as served:
        await served.ask_and_evict([*shared, 7])
        assert await asyncio.gather(*map(served.ask, prompts)) == [answer(model, prompt, 4) for prompt in prompts]
        assert served.engine.metrics.reloaded_tokens == 24
        assert len(served.engine.metrics.hand_outs) == 1


async def test_one_that_comes_while_the_prefix_is_on_its_way_waits_for_the_same_burst(model: Any) -> None:
    prompt = prompt_of(1, 30)
    async with serve(model) as served:
        await served.ask_and_evict(prompt)
        (first,) = await served.ask_and_hold(prompt)
        second = served.ask(prompt)
        served.backend.gate.set()
        assert [await first, await second] == [answer(model, prompt, 4)] * 2
        assert len(served.backend.loads) == 1


@pytest.mark.parametrize("mode", RELOADS)
async def test_two_conversations_whose_shared_reload_failed_both_get_their_answer(model: Any, mode: Mode) -> None:
    prompts = [prompt_of(1, 24) + prompt_of(seed, 5) for seed in (2, 3)]
    async with serve(model, mode=mode, fail_burst=1) as served:
        await served.ask_and_evict(prompt_of(1, 25))
        computed = served.engine.metrics.computed_tokens
        assert await asyncio.gather(*map(served.ask, prompts)) == [answer(model, prompt, 4) for prompt in prompts]
        assert len(served.engine.metrics.stale_bursts) == 1
        computed_in_vain = 5 + 5
        assert served.engine.metrics.computed_tokens - computed - computed_in_vain == 24 + 5 + 5, "the shared part once"


# -- order ----------------------------------------------------------------------------------------------------------


async def test_a_burst_waits_for_what_is_on_its_way_to_the_host(model: Any) -> None:
    async with serve(model) as served:
        await served.ask_and_evict(prompt_of(1, 30))
        calls = served.device.record_calls()
        await served.ask(prompt_of(1, 30))
        fences = {obj for call, obj, stream, _ in calls if (call, stream) == ("record", served.memory.evict_stream)}
        on_h2d = [(call, obj) for call, obj, stream, _ in calls if stream is served.h2d_stream]
        first_layer = [call for call, _ in on_h2d].index("record")
        assert fences & {obj for call, obj in on_h2d[:first_layer] if call == "wait"}


async def test_a_forward_does_not_write_to_pages_that_are_on_their_way_to_the_host(model: Any) -> None:
    evicted: list[bool] = []
    watched_model = WatchedModel(model, before=lambda: evicted.append(served.memory.evict_stream.query()))
    async with serve(watched_model) as served:
        await served.ask(prompt_of(1, 60))
        evicted.clear()
        calls = served.device.record_calls()
        served.device.hold("d2h")
        client = served.ask(prompt_of(2, 60))
        await until(lambda: bool(evicted) or waits_for_the_evict_stream(calls))
        served.device.resume("d2h")
        assert await client == answer(model, prompt_of(2, 60), 4)
        assert all(evicted)


async def test_a_step_waits_for_the_end_of_its_reload_and_is_not_run_twice(model: Any) -> None:
    ended: list[None] = []
    async with serve(WatchedModel(model, after=lambda: ended.append(None))) as served:
        await served.ask_and_evict(prompt_of(1, 30))
        ended.clear()
        served.backend.finish_gate.clear()  # layers land, and the burst does not end
        client = served.ask(prompt_of(1, 30), 3)
        await until(lambda: bool(ended))
        for _ in range(50):  # turns of the loop in which the engine could begin another step
            await asyncio.sleep(0)
        served.backend.finish_gate.set()
        assert await client == answer(model, prompt_of(1, 30), 3)
    assert len(ended) == 3


async def test_a_batch_ends_when_the_device_has_done_it(model: Any) -> None:
    async with serve(model) as served:
        calls = served.device.record_calls()
        await served.ask(prompt_of(1, 20), 1)
        assert [call for call, _, _, thread in calls if thread.startswith("model")][-1] == "synchronize"


async def test_pages_that_are_being_loaded_stay_when_their_clients_have_gone(model: Any) -> None:
    prompt = prompt_of(1, 30)
    async with serve(model, max_batch_tokens=1, max_running=2) as served:
        await served.ask_and_evict(prompt)
        other = served.ask(prompt_of(2, 25), 1)  # whose prompt takes the first batches
        (leaving,) = await served.ask_and_hold(prompt)
        leaving.cancel()
        await other
        nodes = [node for node in served.engine.prefixes.index if node.id in served.backend.loads[-1]]
        third = served.ask(prompt_of(3, 40), 1)
        await until(lambda: served.engine.metrics.waits_for_room > 0 or not all(node.device_pages for node in nodes))
        assert all(node.device_pages for node in nodes)
        served.backend.gate.set()
        assert await third == answer(model, prompt_of(3, 40), 1)


# -- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", RELOADS)
@pytest.mark.parametrize("fail_burst", [1, 2, 5])
async def test_answers_are_right_when_a_reload_fails(model: Any, mode: Mode, fail_burst: int) -> None:
    audit = Audit()
    async with serve(model, mode=mode, fail_burst=fail_burst, audit=audit) as served:
        await hold_chats(served, model)
        assert len(served.engine.metrics.stale_bursts) == 1
    assert audit.compared
    assert audit.differing == []


async def test_the_log_names_the_nodes_that_are_stale(model: Any, logs: list[structlog.types.EventDict]) -> None:
    prompt = prompt_of(1, 30)
    async with serve(model, fail_burst=1) as served:
        await served.ask_and_evict(prompt)
        await served.ask(prompt)
        (failed,) = [entry for entry in logs if entry["event"] == "burst_failed"]
        assert list(failed["node_ids"]) == served.backend.loads[0]


async def test_a_failed_reload_can_be_tried_again_after_the_next_eviction(model: Any) -> None:
    prompt = prompt_of(1, 30)
    async with serve(model, fail_burst=1) as served:
        for _ in range(3):
            assert await served.ask(prompt) == answer(model, prompt, 4)
            await served.evict()
        assert len(served.engine.metrics.stale_bursts) == 1
        assert served.engine.metrics.reloaded_tokens == 24


async def test_a_lost_device_reaches_every_client(model: Any) -> None:
    clients: list[asyncio.Task[list[int]]] = []

    async def lose_it() -> None:
        async with serve(model) as served:
            await served.ask(prompt_of(1, 30))
            clients.extend(served.ask(prompt_of(seed, 30)) for seed in (2, 3, 4))
            served.device.lose(RuntimeError("the device fell off"))
            await asyncio.wait(clients)

    with pytest.raises(RuntimeError, match="fell off"):
        await lose_it()
    assert {str(client.exception()) for client in clients} == {"the device fell off"}


async def test_a_model_that_raises_reaches_every_client(model: Any) -> None:
    class Broken:
        config, dtype = model.config, model.dtype

        def __call__(self, *args: object, **kwargs: object) -> None:
            raise ZeroDivisionError("broken")

    clients: list[asyncio.Task[list[int]]] = []

    async def ask_it() -> None:
        async with serve(Broken()) as served:
            clients.extend(served.ask(prompt_of(seed, 30)) for seed in range(6))
            await asyncio.wait(clients)

    with pytest.raises(ZeroDivisionError):
        await ask_it()
    assert {type(client.exception()) for client in clients} == {ZeroDivisionError}


class BrokenAudit(Audit):
    async def look_at(self, *args: object) -> None:
        raise ZeroDivisionError("broken")


async def test_an_audit_that_raises_ends_the_engine(model: Any) -> None:
    clients: list[asyncio.Task[list[int]]] = []

    async def ask_it() -> None:
        async with serve(model, audit=BrokenAudit()) as served:
            for _ in range(3):
                clients.append(served.ask(prompt_of(1, 30), 20))
                await asyncio.wait(clients)

    with pytest.raises(ZeroDivisionError):
        await ask_it()
    assert clients[0].exception() is None
    later = clients[2].exception()
    assert isinstance(later, EngineClosedError)
    assert isinstance(later.__cause__, ZeroDivisionError)


async def test_an_audit_that_raises_while_the_engine_is_closed_is_not_lost(model: Any) -> None:
    async def ask_it() -> None:
        async with serve(model, audit=BrokenAudit()) as served:
            await served.ask(prompt_of(1, 30))

    with pytest.raises(ZeroDivisionError):
        await ask_it()


async def test_a_hand_out_that_raises_ends_the_engine_and_leaves_no_page_behind(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaks: list[list[str]] = []

    async def fail(**options: Any) -> None:
        raise ZeroDivisionError("no hand-out")

    async def ask_it() -> None:
        async with serve(model) as served:
            await served.ask_and_evict(prompt_of(1, 30))
            monkeypatch.setattr(served.transfers, "start_loading", fail)
            await asyncio.wait([served.ask(prompt_of(1, 30))])
            leaks.append(served.engine.prefixes.leaks())

    with pytest.raises(ZeroDivisionError, match="no hand-out"):
        await ask_it()
    assert leaks == [[]]


# -- clients that go away -------------------------------------------------------------------------------------------


async def test_a_client_goes_away_while_its_prefix_is_being_reloaded(model: Any) -> None:
    prompt = prompt_of(1, 30)
    async with serve(model) as served:
        await served.ask_and_evict(prompt)
        (leaving,) = await served.ask_and_hold(prompt)
        leaving.cancel()
        staying = served.ask(prompt_of(2, 30))
        served.backend.gate.set()
        assert await staying == answer(model, prompt_of(2, 30), 4)
        assert await served.ask(prompt) == answer(model, prompt, 4)
        assert leaving.cancelled()


async def test_a_reload_that_failed_for_a_client_that_went_away_is_forgotten(model: Any) -> None:
    prompt = prompt_of(1, 30)
    async with serve(model, fail_burst=1) as served:
        await served.ask_and_evict(prompt)
        (leaving,) = await served.ask_and_hold(prompt)
        leaving.cancel()
        served.backend.gate.set()
        assert await served.ask(prompt) == answer(model, prompt, 4)


async def test_a_reload_whose_client_went_away_makes_room_when_it_ends(model: Any) -> None:
    prompts = [prompt_of(seed, 50) for seed in (1, 2)]
    async with serve(model, device_tokens=56) as served:
        await served.ask_and_evict(prompts[0])
        calls = served.device.record_calls()
        served.device.hold("d2h")  # neither the eviction nor, behind it, the reload can go on
        leaving = served.ask(prompts[0])
        await until(lambda: waits_for_the_evict_stream(calls))
        leaving.cancel()
        staying = served.ask(prompts[1])
        served.device.step("d2h", 1)  # the forward can, and finds that nobody wants it
        await until(lambda: served.engine.metrics.waits_for_room > 0)
        served.device.resume("d2h")
        assert await staying == answer(model, prompts[1], 4)


async def test_one_of_two_that_share_a_reload_goes_away(model: Any) -> None:
    prompts = [prompt_of(1, 24) + prompt_of(seed, 5) for seed in (2, 3)]
    async with serve(model) as served:
        await served.ask_and_evict(prompt_of(1, 25))
        leaving, staying = await served.ask_and_hold(*prompts)
        leaving.cancel()
        served.backend.gate.set()
        assert await staying == answer(model, prompts[1], 4)


async def test_a_client_goes_away_during_the_forward_that_would_end_its_reply(model: Any) -> None:
    loop = asyncio.get_running_loop()
    gone = threading.Event()
    client: asyncio.Task[list[int]] | None = None

    def leave() -> None:
        assert client is not None
        client.cancel()
        gone.set()

    def before() -> None:
        if not gone.is_set():
            loop.call_soon_threadsafe(leave)
            gone.wait()

    async with serve(WatchedModel(model, before)) as served:
        client = served.ask(prompt_of(1, 5), 1)
        await asyncio.wait([client])
        assert client.cancelled()
        assert await served.ask(prompt_of(2, 20)) == answer(model, prompt_of(2, 20), 4)


async def test_a_client_that_goes_away_before_it_was_admitted_leaves_nothing(model: Any) -> None:
    async with serve(model, device_tokens=56) as served:
        first, second = served.ask(prompt_of(1, 50)), served.ask(prompt_of(2, 50))
        await asyncio.sleep(0)  # both have asked
        second.cancel()
        assert await first == answer(model, prompt_of(1, 50), 4)
        assert await served.ask(prompt_of(3, 50)) == answer(model, prompt_of(3, 50), 4)


# -- the engine's end -----------------------------------------------------------------------------------------------


async def test_closing_tells_clients_that_there_will_be_no_reply(model: Any) -> None:
    async with serve(model) as served:
        clients = [served.ask(prompt_of(seed, 30)) for seed in range(8)]
        await asyncio.sleep(0)  # all have asked
    for client in clients:
        with pytest.raises(EngineClosedError):
            await client
    with pytest.raises(EngineClosedError):
        await served.engine.generate([1, 2, 3], 1)


async def test_closing_waits_for_a_reload_that_is_under_way(model: Any) -> None:
    prompt = prompt_of(1, 30)
    async with serve(model) as served:
        await served.ask_and_evict(prompt)
        (client,) = await served.ask_and_hold(prompt)
        asyncio.get_running_loop().call_later(0, served.backend.gate.set)
    with pytest.raises(EngineClosedError):
        await client


async def test_an_owner_who_is_cancelled_while_the_engine_closes_waits_for_what_is_under_way(model: Any) -> None:
    prompt = prompt_of(1, 30)
    async with serve(model) as served:
        await served.ask_and_evict(prompt)
        (client,) = await served.ask_and_hold(prompt)
        closing = asyncio.create_task(served.engine.__aexit__(None, None, None))
        for _ in range(3):
            for _ in range(10):
                await asyncio.sleep(0)
            assert not closing.done(), "the forward waits for a layer"
            closing.cancel()
        served.backend.gate.set()
        await asyncio.wait([closing, client])
        assert closing.cancelled()
        assert isinstance(client.exception(), EngineClosedError)
        assert served.engine.prefixes.leaks() == []


async def test_pages_are_not_given_back_under_a_forward_when_the_loop_cancels_everything(model: Any) -> None:
    began, go_on = threading.Event(), threading.Event()

    def before() -> None:
        began.set()
        go_on.wait()

    async def serve_and_cancel() -> None:
        async with serve(WatchedModel(model, before)) as served:
            client = served.ask(prompt_of(1, 30))
            await until(began.is_set)
            (scheduler,) = [task for task in asyncio.all_tasks() if task.get_name() == "engine-scheduler"]
            scheduler.cancel()
            for _ in range(10):
                await asyncio.sleep(0)
            told_too_early.append(client.done())
            go_on.set()
            await asyncio.wait([client])

    told_too_early: list[bool] = []
    with pytest.raises(asyncio.CancelledError):
        await serve_and_cancel()
    assert told_too_early == [False]


async def test_an_engine_that_is_not_open_says_so(model: Any, device: EmulatedDevice) -> None:
    memory = Memory(KvShape.of(model), 4, device_pages=16, host_pages=0, runtime=device)
    with pytest.raises(EngineClosedError, match="async with"):
        await Engine(model, memory, tokens_per_node=8).generate([1, 2], 1)


@pytest.mark.parametrize(
    ("prompt", "num_tokens", "error", "message"),
    [
        ([], 4, ValueError, "at least one"),
        ([1], 0, ValueError, "at least 1"),
        ([1, VOCABULARY], 4, ValueError, "the model knows the tokens 0 to 127"),
        ([-1, 1], 4, ValueError, "the model knows the tokens 0 to 127"),
        ([1, 2.0], 4, TypeError, "ints"),
        ([1, 2], 2.5, TypeError, "ints"),
        ([1] * 60, 5, PromptTooLongError, "needs more pages"),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused_and_harms_no_other(
    model: Any, prompt: Any, num_tokens: Any, error: type[Exception], message: str
) -> None:
    async with serve(model) as served:
        other = served.ask(prompt_of(1, 20))
        with pytest.raises(error, match=message):
            await served.engine.generate(prompt, num_tokens)
        assert await other == answer(model, prompt_of(1, 20), 4)


# -- what it measures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", RELOADS)
async def test_metrics_say_what_was_moved(model: Any, mode: Mode) -> None:
    async with serve(model, mode=mode) as served:
        began = time.perf_counter()
        await hold_chats(served, model)
        seconds = time.perf_counter() - began
        metrics, shape = served.engine.metrics, served.memory.shape
        stats = served.transfers.stats() if served.transfers else None
        bytes_per_token = 2 * shape.num_layers * shape.num_heads * shape.head_dim * shape.dtype.itemsize
    assert stats is not None
    assert metrics.reloaded_tokens == stats.loaded_tokens > 0
    assert metrics.reloaded_bytes == metrics.reloaded_tokens * bytes_per_token
    assert len(metrics.hand_outs) == stats.landed_bursts
    assert 0 < sum(metrics.hand_outs) < seconds
    assert metrics.copy_ms == sum(ack.duration_ms or 0 for ack in served.acks) > 0
    assert len(metrics.ttfts) == 12
    assert all(0 < ttft < seconds for ttft in metrics.ttfts)


async def test_a_reload_that_failed_does_not_count_as_one(model: Any) -> None:
    async with serve(model, fail_burst=1) as served:
        await served.ask_and_evict(prompt_of(1, 30))
        await served.ask(prompt_of(1, 30))
        metrics = served.engine.metrics
        assert metrics.stale_bursts == [1]
        assert (metrics.reloaded_tokens, metrics.reloaded_bytes, metrics.copy_ms, metrics.waited_ms) == (0, 0, 0, 0)


def test_a_reload_measures_how_long_the_stream_stood_still() -> None:
    class Clock:
        """A runtime and a handle on whose clock nothing but a wait for a layer takes time."""

        now = 0.0

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.time = Clock.now

            def elapsed_time(self, end: Any) -> float:
                return float(end.time - self.time)

        def wait_layer(self, layer: int) -> None:
            Clock.now += layer

    clock: Any = Clock()
    reload = Reload(clock, clock)
    for layer in (1, 0, 4):
        reload.wait_layer(layer)
    assert reload.take_waited_ms() == 5
    assert reload.take_waited_ms() == 0


# -- all of it at once ----------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(WAYS),
    device_tokens=st.sampled_from([56, 72, 120]),
    host_tokens=st.sampled_from([24, 80, 256]),
    fail_burst=st.none() | st.integers(1, 4),
)
async def test_any_crowd_gets_the_models_own_answers(
    model: Any, seed: int, mode: Mode | None, device_tokens: int, host_tokens: int, fail_burst: int | None
) -> None:
    chance = random.Random(seed)
    audit = Audit()

    async def client(served: Served) -> None:
        for _ in range(3):
            prompt = prompt_of(chance.randrange(2), 8 * chance.randrange(3)) + prompt_of(
                chance.randrange(2, 4), chance.randrange(1, 30)
            )
            asked = served.ask(prompt, 3)
            if chance.random() < 0.3:
                for _ in range(chance.randrange(40)):
                    await asyncio.sleep(0)
                asked.cancel()
                await asyncio.wait([asked])
            else:
                assert await asked == answer(model, prompt, 3)

    async with serve(
        model, mode=mode, device_tokens=device_tokens, host_tokens=host_tokens, fail_burst=fail_burst, audit=audit
    ) as served:
        await asyncio.gather(*(client(served) for _ in range(4)))
    assert audit.differing == []
