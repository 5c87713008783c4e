"""Pools: where KV data lies in memory, on the host and on the device."""

from hicache_sched.pools.pair import PoolPair
from hicache_sched.pools.pool import Layout, PlaneGeometry, Pool

__all__ = ["Layout", "PlaneGeometry", "Pool", "PoolPair"]
