"""What schedulers do, for Prometheus: `pip install 'hicache-sched[metrics]'`.

    with TransferScheduler(backend) as scheduler, SchedulerMetrics(scheduler, "kv"):
        prometheus_client.start_http_server(9400)
        ...

Each has the label `scheduler`. Histograms, in seconds, of bursts that got as far:

    hicache_sched_hand_out_wait_seconds    `start_loading` waited for a slot
    hicache_sched_queue_seconds            then the burst waited for the data plane
    hicache_sched_enqueue_seconds          then its copies were planned and submitted, up to the last layer
    hicache_sched_landing_seconds          then they were made, until the last layer was seen to have landed
    hicache_sched_loop_lag_seconds         from the hand-out until the loop came to the burst; none in inline mode

The first four make up the time from the call of `start_loading` until everything had landed. Counters:

    hicache_sched_loaded_bytes_total, hicache_sched_loaded_tokens_total    of bursts that landed
    hicache_sched_bursts_total             that ended, by `status`: landed, failed, cancelled
    hicache_sched_stalls_total             layers, and hand-outs that wait for a slot, that took longer than
                                           `stall_log_interval`, by `kind`: layer, slot; none in inline mode

And gauges, of what has been noticed when they are scraped:

    hicache_sched_slots_in_use             by bursts that have not ended
    hicache_sched_queued_ops               load ops that no hand-out has taken
    hicache_sched_bursts_queued            that the data plane has not begun
    hicache_sched_bursts_in_flight         that it has begun and that have not ended
    hicache_sched_acks_unpopped            that `pop_acks` has not given
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self

from hicache_sched import AckStatus, HiCacheSchedError, LoadAck, SchedulerClosedError, SchedulerStats, TransferScheduler
from hicache_sched.burst_times import BurstTimes
from hicache_sched.listeners import StallKind

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, Metric
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as exc:
    raise ImportError("hicache_sched.metrics needs prometheus_client: pip install 'hicache-sched[metrics]'") from exc

BUCKETS = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Upper bounds of the histograms, in seconds: from a hand-out's to a stall's."""

STATUSES = {AckStatus.OK: "landed", AckStatus.FAILED: "failed", AckStatus.CANCELLED: "cancelled"}
"""Values of the label `status`."""

_KINDS: tuple[StallKind, ...] = ("layer", "slot")


class SchedulerMetrics:
    """Measures one scheduler, from here until `close`.

    Counters begin at 0, whatever the scheduler has loaded before. The registry keeps the scheduler meanwhile. A scrape
    asks the device nothing and runs no callbacks, so it may come at any time, also while the scheduler is being closed
    and after that.
    """

    def __init__(self, scheduler: TransferScheduler, name: str, registry: CollectorRegistry = REGISTRY) -> None:
        """
        :param name: of the scheduler, for the label `scheduler`.
        :param registry: where the metrics are scraped.
        :raises HiCacheSchedError: a scheduler of that name is being measured in this registry.
        :raises TypeError: one of these is something else.
        :raises ValueError: `name` is no text that can be encoded.
        :raises SchedulerClosedError: this is a forked child of the scheduler's process.
        """
        if not isinstance(scheduler, TransferScheduler):
            raise TypeError(f"scheduler must be a TransferScheduler, not {scheduler!r}")
        if not isinstance(registry, CollectorRegistry):
            raise TypeError(f"registry must be a CollectorRegistry, not {registry!r}")
        if not isinstance(name, str) or not name:
            raise TypeError(f"name must be a string that is not empty, not {name!r}")
        try:
            name.encode()
        except UnicodeEncodeError as exc:
            raise ValueError(f"name {name!r} cannot be scraped: {exc.reason}") from None
        self._scheduler = scheduler
        self._name = name
        self._registry = registry
        self._listener: _Listener | None = None
        with _lock:
            collector = _collectors.get(registry)
            if collector is None:
                collector = _SchedulersCollector()
                registry.register(collector)
                _collectors[registry] = collector
            listener = collector.add(name, scheduler)
        try:
            scheduler.listen(listener)
            self._listener = listener
        except BaseException:
            self._remove()
            raise

    def close(self) -> None:
        """Stop to measure, and take away what has been, so that no stale value is scraped. Idempotent.

        The scheduler goes on, and can be measured again.
        """
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(SchedulerClosedError):  # in a forked child nobody tells it
                self._scheduler.unlisten(listener)
            self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _remove(self) -> None:
        with _lock:
            collector = _collectors[self._registry]
            collector.remove(self._name)
            if collector.is_empty:
                del _collectors[self._registry]
                self._registry.unregister(collector)


class _Listener:
    """What one scheduler's bursts are counted in.

    It has the metrics of its labels, so that one who is told of a last burst after they were taken away counts it
    where nobody scrapes.
    """

    def __init__(self, name: str, families: _Families) -> None:
        self._hand_out_wait = families.hand_out_wait.labels(name)
        self._queue = families.queue.labels(name)
        self._enqueue = families.enqueue.labels(name)
        self._landing = families.landing.labels(name)
        self._loop_lag = families.loop_lag.labels(name)
        self._bytes = families.bytes.labels(name)
        self._tokens = families.tokens.labels(name)
        # All of them from the beginning: a rate wants to see the 0 before the 1.
        self._bursts = {status: families.bursts.labels(name, value) for status, value in STATUSES.items()}
        self._stalls = {kind: families.stalls.labels(name, kind) for kind in _KINDS}

    def burst_ended(self, ack: LoadAck, times: BurstTimes) -> None:
        self._bursts[ack.status].inc()
        self._bytes.inc(ack.num_bytes)
        self._tokens.inc(ack.num_tokens)
        _observe(self._hand_out_wait, times.asked, times.handed_out)
        _observe(self._loop_lag, times.handed_out, times.job_began)
        _observe(self._queue, times.handed_out, times.begun)
        _observe(self._enqueue, times.begun, times.enqueued[-1])
        _observe(self._landing, times.enqueued[-1], times.landed[-1])

    def stalled(self, what: StallKind) -> None:
        self._stalls[what].inc()


def _observe(histogram: Histogram, since: float | None, until: float | None) -> None:
    if since is not None and until is not None:
        histogram.observe(until - since)


class _Families:
    """The histograms and counters of all schedulers in a registry."""

    def __init__(self) -> None:
        self.hand_out_wait = _histogram("hand_out_wait", "Time that start_loading waited for a slot.")
        self.queue = _histogram("queue", "Time from the hand-out until the data plane began the burst.")
        self.enqueue = _histogram("enqueue", "Time from there until the last layer's copies were submitted.")
        self.landing = _histogram("landing", "Time from there until the last layer was seen to have landed.")
        self.loop_lag = _histogram("loop_lag", "Time from the hand-out until the event loop came to the burst.")
        self.bytes = _counter("loaded_bytes", "Bytes of bursts that landed.")
        self.tokens = _counter("loaded_tokens", "Tokens of bursts that landed.")
        self.bursts = _counter("bursts", "Bursts that ended.", "status")
        self.stalls = _counter("stalls", "Layers, and hand-outs that wait for a slot, that were stuck.", "kind")
        self.all: tuple[Histogram | Counter, ...] = (
            *(self.hand_out_wait, self.queue, self.enqueue, self.landing, self.loop_lag),
            *(self.bytes, self.tokens, self.bursts, self.stalls),
        )

    def remove(self, name: str) -> None:
        """Take away the values of a scheduler."""
        values = {self.bursts: STATUSES.values(), self.stalls: _KINDS}
        for family in self.all:
            for labels in [(name, value) for value in values[family]] if family in values else [(name,)]:
                family.remove(*labels)


def _histogram(what: str, documentation: str) -> Histogram:
    name = f"hicache_sched_{what}_seconds"
    return Histogram(name, documentation, ["scheduler"], registry=None, buckets=BUCKETS)


def _counter(what: str, documentation: str, *labels: str) -> Counter:
    return Counter(f"hicache_sched_{what}_total", documentation, ["scheduler", *labels], registry=None)


_GAUGES: dict[str, tuple[str, Callable[[SchedulerStats], int]]] = {
    "slots_in_use": ("Slots whose burst has not ended.", lambda stats: stats.bursts_queued + stats.bursts_in_flight),
    "queued_ops": ("Load ops that no hand-out has taken.", lambda stats: stats.queued_ops),
    "bursts_queued": ("Bursts that the data plane has not begun.", lambda stats: stats.bursts_queued),
    "bursts_in_flight": ("Bursts that it has begun and that have not ended.", lambda stats: stats.bursts_in_flight),
    "acks_unpopped": ("Acks that pop_acks has not given.", lambda stats: stats.acks_unpopped),
}


class _SchedulersCollector(Collector):
    """All that is scraped of the schedulers in one registry."""

    def __init__(self) -> None:
        self._families = _Families()
        self._schedulers: dict[str, TransferScheduler] = {}  # never changed but replaced, as scrapes read it

    @property
    def is_empty(self) -> bool:
        return not self._schedulers

    def add(self, name: str, scheduler: TransferScheduler) -> _Listener:
        if name in self._schedulers:
            raise HiCacheSchedError(
                f"a scheduler named {name!r} is measured in this registry already: "
                "give each its own name, or close the metrics of the other"
            )
        listener = _Listener(name, self._families)
        self._schedulers = {**self._schedulers, name: scheduler}
        return listener

    def remove(self, name: str) -> None:
        self._schedulers = {other: scheduler for other, scheduler in self._schedulers.items() if other != name}
        self._families.remove(name)

    def describe(self) -> Iterator[Metric]:
        for family in self._families.all:
            yield from family.describe()
        yield from self._gauges({})

    def collect(self) -> Iterator[Metric]:
        for family in self._families.all:
            yield from family.collect()
        yield from self._gauges(_stats_of(self._schedulers))

    @staticmethod
    def _gauges(stats_by_name: dict[str, SchedulerStats]) -> Iterator[Metric]:
        for what, (documentation, value_of) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"hicache_sched_{what}", documentation, labels=["scheduler"])
            for name, stats in stats_by_name.items():
                gauge.add_metric([name], value_of(stats))
            yield gauge


def _stats_of(schedulers: dict[str, TransferScheduler]) -> dict[str, SchedulerStats]:
    """One look at each scheduler, for all gauges; a forked child, which has no schedulers, sees none."""
    found = {}
    for name, scheduler in schedulers.items():
        with suppress(SchedulerClosedError):
            found[name] = scheduler.stats(observe=False)
    return found


_lock = threading.Lock()  # of what follows, and of what is registered
_collectors: weakref.WeakKeyDictionary[CollectorRegistry, _SchedulersCollector] = weakref.WeakKeyDictionary()
