"""An asyncio transfer scheduler for hierarchical KV caches, inside the engine process."""

from hicache_sched.ack import AckStatus, LoadAck
from hicache_sched.config import SchedulerConfig
from hicache_sched.copy.backend import BurstBackend
from hicache_sched.errors import (
    DeviceLostError,
    HiCacheSchedError,
    InvalidLoadError,
    LoadCancelledError,
    LoadFailedError,
    SchedulerClosedError,
    TransferTimeoutError,
)
from hicache_sched.handle import LoadHandle
from hicache_sched.load_op import LoadOp, PoolTransfer
from hicache_sched.scheduler import TransferScheduler
from hicache_sched.stats import SchedulerStats

__version__ = "0.1.0"

__all__ = [
    "AckStatus",
    "BurstBackend",
    "DeviceLostError",
    "HiCacheSchedError",
    "InvalidLoadError",
    "LoadAck",
    "LoadCancelledError",
    "LoadFailedError",
    "LoadHandle",
    "LoadOp",
    "PoolTransfer",
    "SchedulerClosedError",
    "SchedulerConfig",
    "SchedulerStats",
    "TransferScheduler",
    "TransferTimeoutError",
]
