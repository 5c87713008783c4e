"""Every exception that `hicache_sched` raises on its own account."""

from __future__ import annotations

from collections.abc import Sequence


class HiCacheSchedError(Exception):
    """Base of all errors of this package; raised itself for misuse that has no class of its own."""


class InvalidLoadError(HiCacheSchedError, ValueError):
    """A load op is malformed.

    Raised by `TransferScheduler.load` for what can be seen without reading an index, and the cause of a
    `LoadFailedError` for what only the index values show.
    """


class LoadFailedError(HiCacheSchedError):
    """A burst failed; the device pages of its nodes are stale.

    Attributes:
        node_ids: nodes whose pages must not be trusted.
        layer: first layer that was not submitted, or None where the failure belongs to no layer.
        cause: what went wrong, also set as `__cause__`.
    """

    def __init__(self, node_ids: Sequence[int], layer: int | None, cause: BaseException) -> None:
        self.node_ids = tuple(node_ids)
        self.layer = layer
        self.cause = cause
        self.__cause__ = cause
        where = "" if layer is None else f" at layer {layer}"
        super().__init__(
            f"load of nodes {list(self.node_ids)} failed{where}: {type(cause).__name__}: {cause}; "
            "their device pages are stale, recompute or load them again"
        )


class LoadCancelledError(HiCacheSchedError):
    """A burst was cancelled before the data plane began it; the device pages of its nodes are stale."""

    def __init__(self, node_ids: Sequence[int]) -> None:
        self.node_ids = tuple(node_ids)
        super().__init__(f"load of nodes {list(self.node_ids)} was cancelled before any copy was submitted")


class TransferTimeoutError(HiCacheSchedError, TimeoutError):
    """A `timeout` ran out. Nothing is lost: the same call may be made again."""


class SchedulerClosedError(HiCacheSchedError):
    """The scheduler cannot serve: not started, still closing, or used in a forked child."""


class DeviceLostError(HiCacheSchedError):
    """Every device call fails; nothing more can be loaded in this process."""
