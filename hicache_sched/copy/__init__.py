"""Planning and submitting copies."""

from hicache_sched.copy.backend import BurstBackend, PlansBursts, SubmitsBursts, TransferPoint
from hicache_sched.copy.plan import CopyPlan
from hicache_sched.copy.pooled import PooledBackend

__all__ = ["BurstBackend", "CopyPlan", "PlansBursts", "PooledBackend", "SubmitsBursts", "TransferPoint"]
