"""What an engine measures of itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Metrics:
    """Sums and samples over the life of an engine.

    Attributes:
        ttfts: seconds from arrival to first token, one for each request that got there.
        hand_outs: seconds that the engine scheduler spent in a hand-out, one for each.
        computed_tokens: tokens that went through the model as part of a prompt, in vain or not.
        reloaded_tokens: tokens of prompts that came back from the host instead.
        reloaded_bytes: their bytes.
        copy_ms: device time of the bursts that brought them.
        waited_ms: how long the model's stream stood still for their layers, for whatever reason they had not landed.
        stale_bursts: numbers of the reloads that failed.
        waits_for_room: how often the oldest request found no room on the device.
    """

    ttfts: list[float] = field(default_factory=list)
    hand_outs: list[float] = field(default_factory=list)
    computed_tokens: int = 0
    reloaded_tokens: int = 0
    reloaded_bytes: int = 0
    copy_ms: float = 0.0
    waited_ms: float = 0.0
    stale_bursts: list[int] = field(default_factory=list)
    waits_for_room: int = 0

    @property
    def hidden_share(self) -> float | None:
        """Which part of the copies' time the forwards did not stand still for; None where nothing was copied.

        Where a burst was late, forwards may stand still for longer than its copies take: then it is 0.
        """
        return max(0.0, 1 - self.waited_ms / self.copy_ms) if self.copy_ms else None
