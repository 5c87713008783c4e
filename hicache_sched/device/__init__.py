"""Runtimes: the device APIs that transfers run on."""

from hicache_sched.device.binding import default_runtime
from hicache_sched.device.emulated import EmulatedDevice, EmulatedEvent, EmulatedStream

__all__ = ["EmulatedDevice", "EmulatedEvent", "EmulatedStream", "default_runtime"]
