"""Settings of a scheduler."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Mode = Literal["async", "inline"]
EventLoop = Literal["uvloop", "asyncio"]
Plane = Literal["auto", "native", "python"]

ENV_PREFIX = "HICACHE_SCHED_"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings of a `TransferScheduler`; frozen, validated when made.

    Attributes:
        mode: "async" submits bursts from the data plane's thread, "inline" on the caller's as engines do without
            this package, creating no thread.
        num_slots: how many bursts may be live at once.
        event_loop: which loop the loop thread runs; "uvloop" falls back to asyncio where it is not installed.
        stall_log_interval: seconds without progress after which a stall is logged, and again while it lasts;
            `math.inf` for never.
        thread_name: name of the loop thread and prefix of the others'.
        poll_acks: whether acks are kept for `pop_acks`; False for engines that only use handles or `on_ack`.
        plane: which data plane there is in async mode: "native", which needs no GIL, "python", or "auto" for the native
            one where there is one for the device and it can plan the backend's bursts. Asked for by name the native one
            also serves other backends on an emulated device: it observes landings, and Python submits. On CUDA there is
            one where the built-in backend makes batches.
        h2d_queue_ops: operations that the h2d stream may hold before submitting one more would block the submitting
            thread, and with it other threads' device calls; what is in flight is kept within it in async mode.
    """

    mode: Mode = "async"
    num_slots: int = 3
    event_loop: EventLoop = "uvloop"
    stall_log_interval: float = 30.0
    thread_name: str = "hicache-sched"
    poll_acks: bool = True
    plane: Plane = "auto"
    h2d_queue_ops: int = 1000

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {get_args(Mode)}, not {self.mode!r}")
        if type(self.num_slots) is not int or self.num_slots < 1:
            raise ValueError(f"num_slots must be an int of at least 1, not {self.num_slots!r}")
        if self.event_loop not in get_args(EventLoop):
            raise ValueError(f"event_loop must be one of {get_args(EventLoop)}, not {self.event_loop!r}")
        if type(self.stall_log_interval) not in (int, float) or not self.stall_log_interval > 0:
            raise ValueError(f"stall_log_interval must be positive seconds, not {self.stall_log_interval!r}")
        try:
            float(self.stall_log_interval)
        except OverflowError:
            raise ValueError("stall_log_interval must be seconds, not more than a float can hold") from None
        if not isinstance(self.thread_name, str) or not self.thread_name:
            raise ValueError(f"thread_name must be a non-empty string, not {self.thread_name!r}")
        if self.plane not in get_args(Plane):
            raise ValueError(f"plane must be one of {get_args(Plane)}, not {self.plane!r}")
        if type(self.h2d_queue_ops) is not int or self.h2d_queue_ops < 1:
            raise ValueError(f"h2d_queue_ops must be an int of at least 1, not {self.h2d_queue_ops!r}")
        if type(self.poll_acks) is not bool:
            raise ValueError(f"poll_acks must be a bool, not {self.poll_acks!r}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> SchedulerConfig:
        """Read the variables `HICACHE_SCHED_<FIELD>`; what is not set keeps its default.

        :param environ: where to read, by default the process environment.
        :raises ValueError: naming the variable whose value does not fit.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for field in fields(cls):
            variable = ENV_PREFIX + field.name.upper()
            if variable in environ:
                try:
                    values[field.name] = _parse(environ[variable], type(field.default))
                    cls(**{field.name: values[field.name]})
                except ValueError as exc:
                    raise ValueError(f"{variable}={environ[variable]!r}: {exc}") from None
        return cls(**values)


def _parse(text: str, kind: type) -> object:
    if kind is bool:
        lowered = text.strip().lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off"):
            return False
        raise ValueError("must be one of 1, true, yes, on, 0, false, no, off")
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ValueError("must be a whole number" if kind is int else "must be a number") from None
    return text.strip()
