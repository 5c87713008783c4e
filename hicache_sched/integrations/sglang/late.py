"""Events that are not recorded yet: what SGLang gets in place of those that a burst will record.

An event of CUDA's that was never recorded is complete, and waiting for it is a no-op (`cudaEventQuery`,
`cudaStreamWaitEvent`). These answer "not yet" until the burst has recorded the real one, and then as that does.

All of it runs on SGLang's scheduler thread, the only one that reads load-back events (docs/sglang.md lists the
readers); a burst's sizes are written on the data plane's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hicache_sched.errors import LoadCancelledError, LoadFailedError
from hicache_sched.handle import LoadHandle

OnFailure = Callable[[LoadFailedError], None]
"""What SGLang is told when it looks at a burst that has failed: raises, or goes on."""


@dataclass(frozen=True)
class Sizes:
    """What a burst moves, as SGLang counts it."""

    num_tokens: int = 0
    num_tokens_by_pool: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0


class HandedOut:
    """A burst, as SGLang sees it.

    Attributes:
        sizes: what it moves; known once its indices have been read.
    """

    def __init__(self, runtime: Any, on_failure: OnFailure) -> None:
        """
        :param runtime: torch's device-module interface.
        """
        self._runtime = runtime
        self._on_failure = on_failure
        self._handle: LoadHandle | None = None
        self.sizes = Sizes()

    @property
    def handle(self) -> LoadHandle:
        assert self._handle is not None, "nobody has it before it is handed out"
        return self._handle

    @handle.setter
    def handle(self, handle: LoadHandle) -> None:
        self._handle = handle

    @property
    def is_ok(self) -> bool:
        """Whether it has landed."""
        return self.handle.done() and not self.handle.stale

    @property
    def duration_ms(self) -> float | None:
        """Device time from the first copy to the last; None where there is none, or it has not landed."""
        return self.handle.result().duration_ms if self.is_ok else None

    def has_ended(self) -> bool:
        """Whether it has landed, or failed; never blocks.

        :raises LoadFailedError: it failed, and SGLang is to know.
        """
        if not self.handle.done():
            return False
        self.check()
        return True

    def has_landed(self, layer: int) -> bool:
        """Whether a layer has landed, or never will; never blocks.

        :raises LoadFailedError: as `has_ended`.
        """
        return self.handle.layer_landed(layer) or self.has_ended()

    def check(self) -> None:
        """
        :raises LoadFailedError: it failed, and SGLang is to know.
        """
        if (error := self.handle.exception()) is not None:
            self._on_failure(error)

    def join(self) -> None:
        """Block until it has ended; nobody is told how."""
        with suppress(LoadFailedError, LoadCancelledError):
            self.handle.result()

    def wait(self, layer: int, stream: Any) -> None:
        """Order a stream behind a layer, blocking until that has been submitted, or never will be.

        :param stream: None for the current one.
        :raises LoadFailedError: as `has_ended`, before anything reads what was not loaded.
        """
        if stream is None or stream == self._runtime.current_stream():
            self.handle.wait_layer(layer)
        else:
            with self._runtime.stream(stream):
                self.handle.wait_layer(layer)
        if self.handle.stale:
            self.join()
            self.check()


class Slot:
    """One of the counter's slots, and the newest burst in it.

    Attributes:
        burst: None where there was none.
    """

    def __init__(self) -> None:
        self.burst: HandedOut | None = None


class LateLayerEvent:
    """The event of a layer of the newest burst in a slot; complete where there was none.

    As a slot's events are recorded again for each of its bursts, this is always about the newest, too.
    """

    def __init__(self, slot: Slot, layer: int) -> None:
        self._slot = slot
        self._layer = layer

    def query(self) -> bool:
        return self._slot.burst is None or self._slot.burst.has_landed(self._layer)

    def wait(self, stream: Any = None) -> None:
        if self._slot.burst is not None:
            self._slot.burst.wait(self._layer, stream)

    def synchronize(self) -> None:
        if self._slot.burst is not None:
            self._slot.burst.join()
            self._slot.burst.check()


class LateFinishEvent:
    """The event behind all of a burst."""

    def __init__(self, burst: HandedOut) -> None:
        self._burst = burst

    def query(self) -> bool:
        return self._burst.has_ended()

    def wait(self, stream: Any = None) -> None:
        self._burst.wait(self._burst.handle.num_layers - 1, stream)

    def synchronize(self) -> None:
        self._burst.join()
        self._burst.check()


class LateStartEvent(LateFinishEvent):
    """The event before a burst's first copy; who waits for it waits for all of the burst, as nobody does."""

    def elapsed_time(self, finish: LateFinishEvent) -> float:
        """Milliseconds from here to `finish`, which is the same burst's.

        :raises RuntimeError: there is no such time, as where a real event was not recorded.
        """
        if (duration := self._burst.duration_ms) is None:
            raise RuntimeError("the burst has not landed, or its events have no timing")
        return duration


class LateAck:
    """A `HiCacheAck` that is there from the hand-out on; sizes and timing are those of a burst that has landed."""

    def __init__(self, burst: HandedOut, node_ids: list[int]) -> None:
        self._burst = burst
        self.node_ids = node_ids
        self.start_event = LateStartEvent(burst)
        self.finish_event = LateFinishEvent(burst)

    @property
    def num_tokens(self) -> int:
        return self._sizes.num_tokens

    @property
    def num_tokens_by_pool(self) -> dict[str, int]:
        return self._sizes.num_tokens_by_pool

    @property
    def num_bytes(self) -> int:
        return self._sizes.num_bytes

    @property
    def timing_enabled(self) -> bool:
        return self._burst.duration_ms is not None

    @property
    def _sizes(self) -> Sizes:
        return self._burst.sizes if self._burst.is_ok else Sizes()
