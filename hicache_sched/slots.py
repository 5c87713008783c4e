"""Slots: the rotating producer index that an engine carries, and the bursts behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_sched.device.binding import DeviceBinding
from hicache_sched.device.runtime import Event

if TYPE_CHECKING:
    from hicache_sched.burst import Burst


class Slot:
    """One rotating index.

    Its start and fence events are used again by each generation: a slot is handed out only when its previous
    burst is done with them.

    Attributes:
        index: 0 to `num_slots` - 1.
        generation: how many times it has been handed out.
        burst: the last burst that was handed out in it, None before the first and after a reset.
    """

    __slots__ = ("burst", "fence_event", "generation", "index", "start_event")

    def __init__(self, index: int, device: DeviceBinding) -> None:
        self.index = index
        self.generation = 0
        self.burst: Burst | None = None
        self.start_event: Event = device.new_event()
        self.fence_event: Event = device.new_event()

    @property
    def is_free(self) -> bool:
        return self.burst is None or self.burst.slot_is_free

    @property
    def is_over(self) -> bool:
        """Whether its burst has ended; it may be free before."""
        return self.burst is None or self.burst.ended


class SlotRing:
    """The slots in rotation; guarded by the lock of whoever owns it."""

    def __init__(self, num_slots: int, device: DeviceBinding) -> None:
        self.slots = [Slot(index, device) for index in range(num_slots)]
        self.next_index = 0

    @property
    def next(self) -> Slot:
        return self.slots[self.next_index]

    @property
    def after_next(self) -> int:
        """Index of the slot after the next."""
        return (self.next_index + 1) % len(self.slots)

    def restart(self) -> None:
        """Rotate from slot 0 again; generations go on."""
        self.next_index = 0
        for slot in self.slots:
            slot.burst = None
