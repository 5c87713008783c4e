"""Metrics: what is scraped over HTTP while bursts run, on each data plane."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, cast
from urllib.request import urlopen

import pytest

from hicache_sched import HiCacheSchedError, LoadFailedError, TransferScheduler, native
from hicache_sched.burst_times import BurstTimes
from hicache_sched.device import EmulatedDevice
from tests.builders import LaunchingBackend, MakeScheduler, Schedulers, hand_out, load_op
from tests.scheduler.crowd import WAIT, eventually

prometheus_client = pytest.importorskip("prometheus_client")
from prometheus_client import CollectorRegistry, Metric, start_http_server  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from hicache_sched.metrics import BUCKETS, SchedulerMetrics  # noqa: E402

MODES = pytest.mark.parametrize("mode", ["async", "inline"])
HISTOGRAMS = ["hand_out_wait", "queue", "enqueue", "landing", "loop_lag"]
NUM_BYTES, NUM_TOKENS = 100, 4
"""Of a burst."""


class SizedBackend(LaunchingBackend):
    """Says how many bytes a burst moves."""

    class Prepared(list[int]):
        num_bytes = NUM_BYTES

    def prepare(self, ops: Any) -> Any:
        return self.Prepared(super().prepare(ops))


@pytest.fixture(
    params=[
        "python",
        pytest.param("native", marks=pytest.mark.skipif(native.module is None, reason="needs the native part")),
    ]
)
def make_scheduler(device: EmulatedDevice, request: pytest.FixtureRequest) -> Iterator[MakeScheduler]:
    """As everywhere, with each data plane."""
    schedulers = Schedulers(device, request.param)
    yield schedulers.make
    schedulers.close()


@pytest.fixture
def backend(device: EmulatedDevice) -> SizedBackend:
    return SizedBackend(device)


class Endpoint:
    """A registry and the server that it is scraped from."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._server, self._thread = start_http_server(0, "localhost", self)

    def collect(self) -> Iterable[Metric]:
        """As a registry does it."""
        return self.registry.collect()

    def scrape(self) -> dict[str, Metric]:
        """The families by their names, without the package's prefix."""
        with urlopen(f"http://localhost:{self._server.server_port}/metrics", timeout=WAIT) as response:
            text = response.read().decode()
        families = text_string_to_metric_families(text)
        return {family.name.removeprefix("hicache_sched_"): family for family in families}

    def value(self, name: str, **labels: str) -> float | None:
        """One sample; None where there is no such."""
        labels.setdefault("scheduler", "kv")
        values = [
            sample.value
            for family in self.scrape().values()
            for sample in family.samples
            if sample.name == f"hicache_sched_{name}" and sample.labels == labels
        ]
        assert len(values) <= 1
        return values[0] if values else None

    def schedulers(self) -> set[str]:
        """Those that any sample is of."""
        return {sample.labels["scheduler"] for family in self.scrape().values() for sample in family.samples}

    def counts(self) -> list[float | None]:
        """How many bursts each histogram has."""
        return [self.value(f"{name}_seconds_count") for name in HISTOGRAMS]

    def seconds(self) -> list[float]:
        """What they add up to."""
        return [self.value(f"{name}_seconds_sum") or 0.0 for name in HISTOGRAMS]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture(scope="module")
def server() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


@pytest.fixture
def endpoint(server: Endpoint) -> Endpoint:
    """One with a registry of the test's own; it takes half a second to end a server."""
    server.registry = CollectorRegistry(auto_describe=True)
    return server


def wait_bursts(endpoint: Endpoint, n: int, status: str = "landed") -> None:
    """Block until so many bursts have been counted: a listener is told after a handle has resolved."""
    eventually(lambda: endpoint.value("bursts_total", status=status) == n)


# -- while bursts run -------------------------------------------------------------------------------------------------


def test_a_burst_in_flight_is_a_gauge_and_counts_once_it_has_landed(
    device: EmulatedDevice, backend: SizedBackend, make_scheduler: MakeScheduler, endpoint: Endpoint
) -> None:
    scheduler = make_scheduler(backend)
    with SchedulerMetrics(scheduler, "kv", endpoint.registry):
        device.hold("h2d")
        handle = hand_out(scheduler, 1, num_tokens=NUM_TOKENS)
        eventually(lambda: handle.layer_enqueued(3))
        assert endpoint.value("bursts_in_flight") == 1
        assert endpoint.value("slots_in_use") == 1
        assert endpoint.value("bursts_total", status="landed") == 0
        assert endpoint.counts() == [0] * len(HISTOGRAMS)

        device.resume("h2d")
        handle.result(WAIT)
        wait_bursts(endpoint, 1)
        assert endpoint.value("bursts_in_flight") == endpoint.value("slots_in_use") == 0
        assert endpoint.value("acks_unpopped") == 1
        assert endpoint.value("loaded_bytes_total") == NUM_BYTES
        assert endpoint.value("loaded_tokens_total") == NUM_TOKENS
        assert endpoint.counts() == [1] * len(HISTOGRAMS)


def test_every_queue_has_a_gauge(
    device: EmulatedDevice, backend: SizedBackend, make_scheduler: MakeScheduler, endpoint: Endpoint
) -> None:
    scheduler = make_scheduler(backend)
    with SchedulerMetrics(scheduler, "kv", endpoint.registry):
        backend.gate.clear()
        hand_out(scheduler, 1)
        assert backend.preparing.wait(WAIT)
        hand_out(scheduler, 2)
        for node in (3, 4, 5):
            scheduler.load(load_op(node))
        gauges = ["slots_in_use", "queued_ops", "bursts_queued", "bursts_in_flight", "acks_unpopped"]
        assert [endpoint.value(gauge) for gauge in gauges] == [2, 3, 1, 1, 0]


@MODES
def test_bursts_that_fail_count_as_such_and_load_nothing(
    backend: SizedBackend, make_scheduler: MakeScheduler, endpoint: Endpoint, mode: str
) -> None:
    scheduler = make_scheduler(backend, mode=mode)
    with SchedulerMetrics(scheduler, "kv", endpoint.registry):
        backend.failures[2] = RuntimeError("no such page")
        with pytest.raises(LoadFailedError):
            hand_out(scheduler, 1).result(WAIT)
        wait_bursts(endpoint, 1, "failed")
        assert endpoint.value("bursts_total", status="landed") == 0
        assert endpoint.value("loaded_bytes_total") == endpoint.value("loaded_tokens_total") == 0
        assert endpoint.counts()[:4] == [1, 1, 0, 0], "it was not enqueued to its end, nor did it land"


def test_cancelled_bursts_count_as_such(
    backend: SizedBackend, make_scheduler: MakeScheduler, endpoint: Endpoint
) -> None:
    scheduler = make_scheduler(backend)
    with SchedulerMetrics(scheduler, "kv", endpoint.registry):
        backend.gate.clear()
        hand_out(scheduler, 1)
        assert backend.preparing.wait(WAIT)
        assert hand_out(scheduler, 2).cancel()
        backend.gate.set()
        wait_bursts(endpoint, 1, "cancelled")
        assert endpoint.value("bursts_total", status="landed") == 1
        assert endpoint.counts() == [2, 1, 1, 1, 2], "the cancelled one was handed out, and no more"


def test_stalls_are_counted_once_each(
    device: EmulatedDevice, make_scheduler: MakeScheduler, endpoint: Endpoint, logs: list[Any]
) -> None:
    scheduler = make_scheduler(num_slots=1, stall_log_interval=0.01)
    with SchedulerMetrics(scheduler, "kv", endpoint.registry):
        assert endpoint.value("stalls_total", kind="layer") == endpoint.value("stalls_total", kind="slot") == 0
        device.hold("h2d")
        hand_out(scheduler, 1)
        scheduler.load(load_op(2))
        waiting = threading.Thread(target=scheduler.start_loading_sync)
        waiting.start()
        for event in ("layer_stalled", "slot_stalled"):
            eventually(lambda event=event: [entry["event"] for entry in logs].count(event) >= 3)  # type: ignore[misc]
        assert endpoint.value("stalls_total", kind="layer") == endpoint.value("stalls_total", kind="slot") == 1
        device.resume("h2d")
        waiting.join()


def test_times_fall_into_buckets_from_ten_microseconds_to_ten_seconds(
    make_scheduler: MakeScheduler, endpoint: Endpoint
) -> None:
    scheduler = make_scheduler()
    with SchedulerMetrics(scheduler, "kv", endpoint.registry):
        hand_out(scheduler, 1)
        wait_bursts(endpoint, 1)
        bounds = [
            float(sample.labels["le"])
            for sample in endpoint.scrape()["queue_seconds"].samples
            if sample.name.endswith("_bucket")
        ]
    assert bounds == [*BUCKETS, float("inf")]
    assert (BUCKETS[0], BUCKETS[-1]) == (1e-5, 10.0)
    assert list(BUCKETS) == sorted(BUCKETS)


def test_each_histogram_has_its_part_of_the_time(make_scheduler: MakeScheduler, endpoint: Endpoint) -> None:
    scheduler = make_scheduler()
    with SchedulerMetrics(scheduler, "kv", endpoint.registry):
        ack = hand_out(scheduler, 1).result(WAIT)
        wait_bursts(endpoint, 1)
        before = endpoint.seconds()
        (listening,) = scheduler._listeners.present
        listening.listener.burst_ended(
            ack,
            BurstTimes(
                asked=100.0,
                handed_out=101.0,
                job_began=133.0,
                begun=103.0,
                planned=104.0,
                submitted=108.0,
                ended=120.0,
                enqueued=(105.0, 106.0, 107.0),
                landed=(109.0, 112.0, 115.0),
            ),
        )
        added = [now - then for now, then in zip(endpoint.seconds(), before, strict=True)]
    assert added == pytest.approx([1.0, 2.0, 4.0, 8.0, 32.0])


# -- several schedulers, several registries ---------------------------------------------------------------------------


def test_two_schedulers_are_told_apart(
    device: EmulatedDevice, make_scheduler: MakeScheduler, endpoint: Endpoint
) -> None:
    kv, draft = make_scheduler(), make_scheduler()
    with SchedulerMetrics(kv, "kv", endpoint.registry), SchedulerMetrics(draft, "draft", endpoint.registry):
        for node in (1, 2):
            hand_out(kv, node)
        hand_out(draft, 3)
        eventually(lambda: endpoint.value("bursts_total", status="landed") == 2)
        eventually(lambda: endpoint.value("bursts_total", status="landed", scheduler="draft") == 1)
        device.hold("h2d")
        hand_out(draft, 4)
        assert endpoint.value("slots_in_use") == 0
        assert endpoint.value("slots_in_use", scheduler="draft") == 1


def test_a_name_given_twice_is_refused_and_the_first_goes_on(make_scheduler: MakeScheduler, endpoint: Endpoint) -> None:
    scheduler, other = make_scheduler(), make_scheduler()
    with SchedulerMetrics(scheduler, "kv", endpoint.registry):
        with pytest.raises(HiCacheSchedError, match="'kv' is measured in this registry already"):
            SchedulerMetrics(other, "kv", endpoint.registry)
        hand_out(other, 1).result(WAIT)
        hand_out(scheduler, 1)
        wait_bursts(endpoint, 1)
        assert other._listeners.present == ()


@pytest.mark.parametrize("name", ["", None, 3])
def test_what_is_no_name_is_refused(make_scheduler: MakeScheduler, endpoint: Endpoint, name: Any) -> None:
    with pytest.raises(TypeError, match="name"):
        SchedulerMetrics(make_scheduler(), name, endpoint.registry)


def test_what_is_no_scheduler_or_registry_or_cannot_be_encoded_is_refused(
    make_scheduler: MakeScheduler, endpoint: Endpoint
) -> None:
    scheduler, nothing = make_scheduler(), cast("Any", None)
    with pytest.raises(TypeError, match="scheduler must be"):
        SchedulerMetrics(nothing, "kv", endpoint.registry)
    with pytest.raises(TypeError, match="registry must be"):
        SchedulerMetrics(scheduler, "kv", nothing)
    with pytest.raises(ValueError, match="cannot be scraped"):
        SchedulerMetrics(scheduler, "\ud800", endpoint.registry)
    assert list(endpoint.registry.collect()) == []


def test_a_scheduler_may_have_two_registries_and_the_same_name_in_both(
    make_scheduler: MakeScheduler, endpoint: Endpoint
) -> None:
    scheduler, second = make_scheduler(), CollectorRegistry()
    with (
        SchedulerMetrics(scheduler, "kv", endpoint.registry),
        SchedulerMetrics(scheduler, "kv", second),
    ):
        hand_out(scheduler, 1)
        wait_bursts(endpoint, 1)
        eventually(
            lambda: second.get_sample_value("hicache_sched_bursts_total", {"scheduler": "kv", "status": "landed"}) == 1
        )


def test_the_default_registry_is_prometheus_clients(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    with SchedulerMetrics(scheduler, "default"):
        labels = {"scheduler": "default"}
        assert prometheus_client.REGISTRY.get_sample_value("hicache_sched_queued_ops", labels) == 0
    assert prometheus_client.REGISTRY.get_sample_value("hicache_sched_queued_ops", labels) is None


# -- until they are closed --------------------------------------------------------------------------------------------


def test_closing_takes_away_all_values_of_that_scheduler_and_no_others(
    make_scheduler: MakeScheduler, endpoint: Endpoint
) -> None:
    scheduler, other = make_scheduler(), make_scheduler()
    with SchedulerMetrics(other, "other", endpoint.registry):
        with SchedulerMetrics(scheduler, "kv", endpoint.registry) as metrics:
            hand_out(scheduler, 1)
            wait_bursts(endpoint, 1)
        assert endpoint.schedulers() == {"other"}
        assert hand_out(scheduler, 2)._burst.clock is None, "nothing is timed any more"
        metrics.close()
        assert endpoint.schedulers() == {"other"}
    assert endpoint.scrape() == {}, "the registry is as it was"


def test_a_burst_that_ends_after_the_close_brings_nothing_back(
    device: EmulatedDevice, make_scheduler: MakeScheduler, endpoint: Endpoint
) -> None:
    scheduler, other = make_scheduler(), make_scheduler()
    with SchedulerMetrics(other, "other", endpoint.registry):
        metrics = SchedulerMetrics(scheduler, "kv", endpoint.registry)
        (listening,) = scheduler._listeners.present
        device.hold("h2d")
        handle = hand_out(scheduler, 1)
        metrics.close()
        device.resume("h2d")
        ack = handle.result(WAIT)
        scheduler.close(WAIT)
        # One who was being told at that moment is told to the end.
        listening.listener.burst_ended(ack, handle._burst.clock.times(handle._burst.progress, 4))
        listening.listener.stalled("layer")
        assert endpoint.schedulers() == {"other"}


def test_a_scheduler_can_be_measured_again_from_zero(make_scheduler: MakeScheduler, endpoint: Endpoint) -> None:
    scheduler = make_scheduler()
    for _ in range(2):
        with SchedulerMetrics(scheduler, "kv", endpoint.registry):
            assert endpoint.value("bursts_total", status="landed") == 0
            hand_out(scheduler, 1)
            wait_bursts(endpoint, 1)


def test_a_closed_scheduler_is_scraped_and_so_is_one_that_was_not_started(
    make_scheduler: MakeScheduler, endpoint: Endpoint
) -> None:
    scheduler = make_scheduler(start=False)
    with SchedulerMetrics(scheduler, "kv", endpoint.registry):
        assert endpoint.value("slots_in_use") == 0
        scheduler.start()
        hand_out(scheduler, 1)
        scheduler.close(WAIT)
        assert endpoint.value("bursts_total", status="landed") == 1
        assert endpoint.value("acks_unpopped") == 1
        hand_out(scheduler, 2).result(WAIT)
        assert endpoint.value("bursts_total", status="landed") == 2
        assert endpoint.counts() == [2, 2, 2, 2, 1], "of the one that was loaded inline the loop knew nothing"


def test_a_scrape_may_come_at_any_time_of_a_scheduler(make_scheduler: MakeScheduler, endpoint: Endpoint) -> None:
    done = threading.Event()
    errors: list[BaseException] = []

    def scrape_on() -> None:
        try:
            while not done.is_set():
                list(endpoint.registry.collect())
        except BaseException as exc:
            errors.append(exc)

    scraping = [threading.Thread(target=scrape_on) for _ in range(2)]
    for thread in scraping:
        thread.start()
    for _ in range(10):
        scheduler = make_scheduler()
        with SchedulerMetrics(scheduler, "kv", endpoint.registry):
            for node in (1, 2, 3):
                hand_out(scheduler, node)
            scheduler.close(WAIT)
            assert endpoint.value("bursts_total", status="landed") == 3
    done.set()
    for thread in scraping:
        thread.join()
    assert errors == []


def test_a_scrape_runs_no_callback_in_inline_mode(make_scheduler: MakeScheduler, endpoint: Endpoint) -> None:
    threads: list[str] = []
    scheduler = make_scheduler(mode="inline", on_ack=lambda ack: threads.append(threading.current_thread().name))
    with SchedulerMetrics(scheduler, "kv", endpoint.registry):
        handle = hand_out(scheduler, 1)
        scheduler.h2d_stream.synchronize()
        assert endpoint.value("bursts_in_flight") == 1, "nobody has noticed yet that it has landed"
        handle.result(WAIT)
        assert endpoint.value("bursts_in_flight") == 0
    assert threads == [threading.current_thread().name]


def test_a_forked_child_is_scraped_without_the_parents_gauges(
    make_scheduler: MakeScheduler, endpoint: Endpoint
) -> None:
    scheduler = make_scheduler()
    with SchedulerMetrics(scheduler, "kv", endpoint.registry):
        pid, scheduler._guard._pid = scheduler._guard._pid, -1  # as a child sees it
        assert endpoint.value("slots_in_use") is None
        scheduler._guard._pid = pid
        assert endpoint.value("slots_in_use") == 0


def test_a_forked_child_can_close_them(make_scheduler: MakeScheduler, endpoint: Endpoint) -> None:
    scheduler = make_scheduler()
    metrics = SchedulerMetrics(scheduler, "kv", endpoint.registry)
    pid, scheduler._guard._pid = scheduler._guard._pid, -1  # as a child sees it
    metrics.close()
    scheduler._guard._pid = pid
    assert list(endpoint.registry.collect()) == []


def test_a_scheduler_of_which_the_metrics_were_closed_can_go(device: EmulatedDevice, endpoint: Endpoint) -> None:
    scheduler = TransferScheduler(LaunchingBackend(device), runtime=device)
    metrics = SchedulerMetrics(scheduler, "kv", endpoint.registry)
    metrics.close()
    gone = weakref.ref(scheduler)
    del scheduler, metrics
    gc.collect()
    assert gone() is None


# -- where they are not used ------------------------------------------------------------------------------------------


def run(script: str, *args: str, **environment: str) -> str:
    ran = subprocess.run(
        [sys.executable, *args, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_who_does_not_use_them_imports_no_prometheus_client() -> None:
    script = """
import pkgutil, sys
import hicache_sched, hicache_sched.copy, hicache_sched.pools, hicache_sched.device, hicache_sched.listeners
print(sorted(name for name in sys.modules if "prometheus" in name or name == "hicache_sched.metrics"))
"""
    assert run(script) == "[]\n"


def test_without_prometheus_client_they_say_what_to_install() -> None:
    script = """
import sys
sys.modules["prometheus_client"] = None
try:
    import hicache_sched.metrics
except ImportError as exc:
    print(exc)
"""
    assert "pip install 'hicache-sched[metrics]'" in run(script)
