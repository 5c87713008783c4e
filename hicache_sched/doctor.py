"""What there is here, and what was asked for and is missing: `python -m hicache_sched doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import NamedTuple

import torch

from hicache_sched import LoadOp, SchedulerConfig, TransferScheduler, native
from hicache_sched.config import ENV_PREFIX
from hicache_sched.copy import PooledBackend
from hicache_sched.device import EmulatedDevice
from hicache_sched.errors import HiCacheSchedError
from hicache_sched.loop_thread import loop_factory
from hicache_sched.pools import Pool, PoolPair

TIMEOUT = 30.0
"""Seconds that a burst of a few bytes may take."""


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        what: its name.
        found: what it is here, in words.
        is_missing: whether it was asked for and is not there.
    """

    what: str
    found: str
    is_missing: bool = False


def examine(environ: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Look at versions, the accelerator and the native part, and load a burst with the settings of the environment.

    :param environ: where settings are read, by default the process environment.
    """
    environ = os.environ if environ is None else environ
    for package in ("hicache-sched", "torch", "numpy", "uvloop", "structlog"):
        yield Finding(package, _version(package))
    gil = "on" if getattr(sys, "_is_gil_enabled", lambda: True)() else "off"
    yield Finding("python", f"{platform.python_implementation()} {platform.python_version()}, GIL {gil}")
    yield Finding("accelerator", torch.cuda.get_device_name() if torch.cuda.is_available() else "none: emulated")
    yield Finding("page-locked memory", _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]))
    yield Finding("native part", "there" if native.module is not None else f"missing: {native.missing_because}")
    try:
        config = SchedulerConfig.from_env(environ)
    except ValueError as exc:
        yield Finding("settings", str(exc), is_missing=True)
        return
    _, event_loop = loop_factory(config.event_loop)
    asked_for_loop = f"{ENV_PREFIX}EVENT_LOOP" in environ
    yield Finding("event loop", event_loop, is_missing=asked_for_loop and event_loop != config.event_loop)
    yield from _load_a_burst(config)


def _load_a_burst(config: SchedulerConfig) -> Iterator[Finding]:
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    host = Pool.mha(4, 4, 2, 1, 8, torch.uint8, layout="page_first_direct")
    device = Pool.mha(4, 4, 2, 1, 8, torch.uint8, device=accelerator)
    for pool, value in ((host, 1), (device, 0)):
        for rows in pool.planes:
            rows.fill_(value)
    backend = PooledBackend([PoolPair("kv", host, device)])
    with nullcontext(torch.cuda) if accelerator == "cuda" else EmulatedDevice() as runtime:
        scheduler = TransferScheduler(backend, runtime=runtime, config=config)
        try:
            with scheduler:
                plane, reason = scheduler.stats().plane, scheduler.plane_reason
                scheduler.load(LoadOp(1, torch.arange(4, 8), torch.arange(8, 12)))
                handle = scheduler.start_loading_sync(TIMEOUT)
                assert handle is not None
                handle.result(TIMEOUT)
        except HiCacheSchedError as exc:
            yield Finding("a burst", f"failed: {exc}", is_missing=True)
            return
    arrived = all(int(rows.sum()) == 2 * 4 * 8 for rows in device.planes)
    yield Finding("a burst", "arrived" if arrived else "left other bytes than it should", is_missing=not arrived)
    yield Finding("data plane", plane if reason is None else f"{plane}, because {reason}")
    yield Finding("copies", backend.copy_method or "inline")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _limit(num_bytes: int) -> str:
    return "no limit" if num_bytes == resource.RLIM_INFINITY else f"at most {num_bytes // 1024} KiB (ulimit -l)"
