"""What happens while one burst is loaded and the forward that it is for runs, as a timeline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Final, NamedTuple

from hicache_sched import LoadAck, LoadHandle, LoadOp, SchedulerConfig, TransferScheduler
from hicache_sched.bench.overlap import OverlapBench, backend_of
from hicache_sched.bench.timeline import (
    COMPUTE_ENGINE,
    DATA_PLANE,
    ENGINE_SCHEDULER,
    H2D_ENGINE,
    LOOP,
    MODEL_THREAD,
    Instant,
    Span,
    Timeline,
)
from hicache_sched.bench.workload import hand_out
from hicache_sched.burst_times import BurstTimes
from hicache_sched.device import EmulatedDevice, EmulatedStream
from hicache_sched.device.emulated_core import DeviceOperation
from hicache_sched.listeners import StallKind

SHORTEST_WAIT: Final = 20e-6
"""Seconds. What is shorter is no wait, but what it takes to see that there is nothing to wait for."""


def record_overlap(bench: OverlapBench) -> list[Timeline]:
    """Load what a benchmark has measured some more times, inline and async, with layers that take as long to compute as
    to copy. Inline the engine submits layer by layer as slowly as it was told to; async the burst is planned.

    :return: for each way the burst with the median makespan, of as many as there were rounds.
    """
    pair, op = bench.load()
    timelines = []
    inline, asynchronous = SchedulerConfig(mode="inline"), SchedulerConfig()
    for config, enqueue_ms in ((inline, bench.enqueue_ms), (asynchronous, 0.0)):
        submission = f"{enqueue_ms:g} ms of CPU to submit a layer" if enqueue_ms else "planned"
        with (
            EmulatedDevice(h2d_bandwidth=bench.bandwidth) as device,
            TransferScheduler(backend_of(pair, enqueue_ms), runtime=device, config=config) as scheduler,
        ):
            title = f"{config.mode}, {submission}"
            recorded = [
                record_forward(title, device, scheduler, op, bench.copy_ms * 1e-3) for _ in range(bench.rounds + 1)
            ]
            by_makespan = sorted(recorded[1:], key=lambda timeline: timeline.makespan)  # the first finds all cold
            timelines.append(by_makespan[len(by_makespan) // 2])
    return timelines


def record_forward(
    title: str, device: EmulatedDevice, scheduler: TransferScheduler, op: LoadOp, compute: float
) -> Timeline:
    """Hand a burst out on the calling thread, as an engine scheduler does, and launch its forward on another, as soon
    as that has the handle. The device does nothing else meanwhile, and goes on recording its operations.

    :param compute: seconds that a layer takes to compute.
    """
    stream, kept = device.Stream(), _Kept()
    scheduler.listen(kept)
    with ThreadPoolExecutor(1, MODEL_THREAD) as model_thread:
        model_thread.submit(time.monotonic).result()  # it is started
        operations = device.record_operations()
        asked = time.monotonic()
        handle = hand_out(scheduler, op)
        handed_out = time.monotonic()
        launches = model_thread.submit(_launch, device, stream, handle, compute).result()
        stream.synchronize()
        handle.result()
        scheduler.pop_acks()
    times = kept.times.result()
    scheduler.unlisten(kept)
    burst, landings = burst_spans(times, DATA_PLANE if times.job_began is not None else ENGINE_SCHEDULER)
    spans = chain(
        (Span(ENGINE_SCHEDULER, "hand-out", asked, handed_out, "hand-out"),),
        burst,
        _launching(launches),
        _copies([each for each in operations if each.engine == "h2d"]),
        _forwards(launches, [each for each in operations if each.engine == "compute"]),
    )
    return Timeline(title, tuple(spans), tuple(landings))


class _Kept:
    """A listener that keeps when one burst got where."""

    def __init__(self) -> None:
        self.times: Future[BurstTimes] = Future()

    def burst_ended(self, ack: LoadAck, times: BurstTimes) -> None:
        self.times.set_result(times)

    def stalled(self, what: StallKind) -> None:
        """The picture shows it."""


class _Launch(NamedTuple):
    """When a layer's wait began, and when it ended, which is when the layer is launched."""

    asked: float
    launched: float


def _launch(device: EmulatedDevice, stream: EmulatedStream, handle: LoadHandle, compute: float) -> list[_Launch]:
    """On the model thread: launch a forward, each layer behind its copies."""
    launches = []
    with device.stream(stream):
        for layer in range(handle.num_layers):
            asked = time.monotonic()
            handle.wait_layer(layer)
            launches.append(_Launch(asked, time.monotonic()))
            device.launch(None, duration=compute)
    return launches


def _launching(launches: Sequence[_Launch]) -> Iterator[Span]:
    """What the model thread does, and that it waits meanwhile for a layer to be enqueued."""
    yield Span(MODEL_THREAD, "launches the forward", launches[0].asked, launches[-1].launched)
    for layer, (asked, launched) in enumerate(launches):
        if launched - asked >= SHORTEST_WAIT:
            yield Span(MODEL_THREAD, f"wait_layer({layer})", asked, launched, "wait", layer)


def _copies(operations: Sequence[DeviceOperation]) -> Iterator[Span]:
    """One operation copies a layer."""
    for layer, operation in enumerate(operations):
        yield Span(H2D_ENGINE, f"copy layer {layer}", operation.begin, operation.end, "copy", layer)


def _forwards(launches: Sequence[_Launch], operations: Sequence[DeviceOperation]) -> Iterator[Span]:
    """One operation computes a layer. Between two the engine waits for the layer's copy, once it was launched."""
    free = 0.0
    for layer, (launch, operation) in enumerate(zip(launches, operations, strict=True)):
        idle_from = max(free, launch.launched)
        if operation.begin - idle_from >= SHORTEST_WAIT:
            yield Span(COMPUTE_ENGINE, f"wait for copy of layer {layer}", idle_from, operation.begin, "wait", layer)
        yield Span(COMPUTE_ENGINE, f"forward of layer {layer}", operation.begin, operation.end, "forward", layer)
        free = operation.end


def burst_spans(times: BurstTimes, submits_on: str = DATA_PLANE) -> tuple[list[Span], list[Instant]]:
    """What the data plane and the loop did for a burst. Where the stream is full, a layer's submission has the wait for
    room in it.

    :param submits_on: the track of the thread that submits, which inline is the engine scheduler's.
    """

    def span(track: str, name: str, begin: float | None, end: float | None) -> Iterator[Span]:
        if begin is not None and end is not None and begin < end:
            yield Span(track, name, begin, end, "wait" if name == "queued" else "other")

    spans = [
        *span(submits_on, "queued", times.handed_out, times.begun),
        *span(submits_on, "prepare", times.begun, times.planned),
        *span(LOOP, "job", times.job_began, times.ended),
    ]
    begin = times.planned
    for layer, enqueued in enumerate(times.enqueued):
        if begin is None or enqueued is None:
            break
        spans.append(Span(submits_on, f"submit layer {layer}", begin, enqueued, "submit", layer))
        begin = enqueued
    # Inline they are seen when somebody asks, which says nothing of the device.
    landed = enumerate(times.landed if submits_on == DATA_PLANE else ())
    instants = [
        Instant(submits_on, f"layer {layer} seen to have landed", at, layer) for layer, at in landed if at is not None
    ]
    return spans, instants
