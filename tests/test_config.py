"""Settings: defaults, the environment, and values that make no sense."""

from __future__ import annotations

import dataclasses
import math
from decimal import Decimal
from typing import Any

import pytest

from hicache_sched import SchedulerConfig


def test_the_defaults_are_those_of_the_contract() -> None:
    assert dataclasses.asdict(SchedulerConfig()) == {
        "mode": "async",
        "num_slots": 3,
        "event_loop": "uvloop",
        "stall_log_interval": 30.0,
        "thread_name": "hicache-sched",
        "poll_acks": True,
        "plane": "auto",
        "h2d_queue_ops": 1000,
    }


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SchedulerConfig().num_slots = 4  # type: ignore[misc]


@pytest.mark.parametrize(("field", "value", "message"), [
    ("mode", "sync", r"mode must be one of \('async', 'inline'\), not 'sync'"),
    ("mode", None, "mode must be one of"),
    ("mode", ["async"], "mode must be one of"),
    ("num_slots", 0, "num_slots must be an int of at least 1, not 0"),
    ("num_slots", -3, "num_slots must be an int of at least 1, not -3"),
    ("num_slots", 3.0, "num_slots must be an int of at least 1, not 3.0"),
    ("num_slots", True, "num_slots must be an int of at least 1, not True"),
    ("num_slots", "3", "num_slots must be an int of at least 1, not '3'"),
    ("event_loop", "trio", r"event_loop must be one of \('uvloop', 'asyncio'\), not 'trio'"),
    ("stall_log_interval", 0, "stall_log_interval must be positive seconds, not 0"),
    ("stall_log_interval", -1.0, "stall_log_interval must be positive seconds, not -1.0"),
    ("stall_log_interval", math.nan, "stall_log_interval must be positive seconds, not nan"),
    ("stall_log_interval", -math.inf, "stall_log_interval must be positive seconds, not -inf"),
    ("stall_log_interval", True, "stall_log_interval must be positive seconds, not True"),
    ("stall_log_interval", None, "stall_log_interval must be positive seconds, not None"),
    ("stall_log_interval", Decimal(1), "stall_log_interval must be positive seconds"),
    ("stall_log_interval", 10**400, "stall_log_interval must be seconds, not more than a float can hold"),
    ("thread_name", "", "thread_name must be a non-empty string, not ''"),
    ("thread_name", 7, "thread_name must be a non-empty string, not 7"),
    ("poll_acks", 1, "poll_acks must be a bool, not 1"),
    ("poll_acks", None, "poll_acks must be a bool, not None"),
    ("plane", "cuda", r"plane must be one of \('auto', 'native', 'python'\), not 'cuda'"),
    ("plane", None, "plane must be one of"),
    ("h2d_queue_ops", 0, "h2d_queue_ops must be an int of at least 1, not 0"),
    ("h2d_queue_ops", 1e3, "h2d_queue_ops must be an int of at least 1, not 1000.0"),
])  # fmt: skip
def test_a_value_that_makes_no_sense_is_refused_with_what_would(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**{field: value})


@pytest.mark.parametrize("interval", [1, 0.001, math.inf])
def test_any_positive_interval_will_do_and_infinity_too(interval: float) -> None:
    assert SchedulerConfig(stall_log_interval=interval).stall_log_interval == interval


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="num_slot"):
        SchedulerConfig(num_slot=3)  # type: ignore[call-arg]


# -- the environment ------------------------------------------------------------------------------------------------


def test_an_empty_environment_gives_the_defaults() -> None:
    assert SchedulerConfig.from_env({}) == SchedulerConfig()


def test_every_setting_can_come_from_the_environment() -> None:
    environ = {
        "HICACHE_SCHED_MODE": "inline",
        "HICACHE_SCHED_NUM_SLOTS": "5",
        "HICACHE_SCHED_EVENT_LOOP": "asyncio",
        "HICACHE_SCHED_STALL_LOG_INTERVAL": "2.5",
        "HICACHE_SCHED_THREAD_NAME": "loads",
        "HICACHE_SCHED_POLL_ACKS": "off",
        "HICACHE_SCHED_PLANE": "python",
        "HICACHE_SCHED_H2D_QUEUE_OPS": "500",
    }
    assert {f"HICACHE_SCHED_{field.name.upper()}" for field in dataclasses.fields(SchedulerConfig)} == environ.keys()
    assert SchedulerConfig.from_env(environ) == SchedulerConfig(
        mode="inline",
        num_slots=5,
        event_loop="asyncio",
        stall_log_interval=2.5,
        thread_name="loads",
        poll_acks=False,
        plane="python",
        h2d_queue_ops=500,
    )


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_SCHED_NUM_SLOTS", "7")
    assert SchedulerConfig.from_env().num_slots == 7


def test_other_variables_are_left_alone() -> None:
    assert SchedulerConfig.from_env({"NUM_SLOTS": "7", "HICACHE_SCHED_OTHER": "x"}) == SchedulerConfig()


def test_the_interval_may_be_infinite() -> None:
    config = SchedulerConfig.from_env({"HICACHE_SCHED_STALL_LOG_INTERVAL": "inf"})
    assert math.isinf(config.stall_log_interval)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("Yes", True), (" ON ", True), ("0", False), ("FALSE", False), ("no", False)],
)
def test_a_switch_is_written_in_any_of_the_usual_ways(text: str, value: bool) -> None:
    assert SchedulerConfig.from_env({"HICACHE_SCHED_POLL_ACKS": text}).poll_acks is value


@pytest.mark.parametrize(("variable", "text", "message"), [
    ("HICACHE_SCHED_MODE", "sync", r"HICACHE_SCHED_MODE='sync': mode must be one of \('async', 'inline'\)"),
    ("HICACHE_SCHED_NUM_SLOTS", "three", "HICACHE_SCHED_NUM_SLOTS='three': must be a whole number"),
    ("HICACHE_SCHED_NUM_SLOTS", "3.5", "HICACHE_SCHED_NUM_SLOTS='3.5': must be a whole number"),
    ("HICACHE_SCHED_NUM_SLOTS", "", "HICACHE_SCHED_NUM_SLOTS='': must be a whole number"),
    ("HICACHE_SCHED_NUM_SLOTS", "0", "HICACHE_SCHED_NUM_SLOTS='0': num_slots must be an int of at least 1"),
    ("HICACHE_SCHED_STALL_LOG_INTERVAL", "soon", "HICACHE_SCHED_STALL_LOG_INTERVAL='soon': must be a number"),
    ("HICACHE_SCHED_STALL_LOG_INTERVAL", "nan", "HICACHE_SCHED_STALL_LOG_INTERVAL='nan': .* must be positive seconds"),
    ("HICACHE_SCHED_THREAD_NAME", " ", "HICACHE_SCHED_THREAD_NAME=' ': thread_name must be a non-empty string"),
    ("HICACHE_SCHED_POLL_ACKS", "maybe", "HICACHE_SCHED_POLL_ACKS='maybe': must be one of 1, true, yes, on, 0"),
])  # fmt: skip
def test_a_variable_that_makes_no_sense_is_refused_by_its_name(variable: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerConfig.from_env({variable: text})
