"""The memory of the compute device, as a budget that is "auto" or a share of it needs to know it."""

from __future__ import annotations

from dataclasses import dataclass

from .passes.schedule import format_bytes

MARGIN = 0.05
"""Share of the device's memory that "auto" leaves free: for what libraries allocate, and for holes between tensors."""

UNKNOWN = 0.5
""""auto" takes this share of what is free for weights where no graph says yet what activations need."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device when a model is planned for.

    Fields:
        device: such as "cuda:0".
        free: that this process can have, together with what selected weights take there now, and less the rest of a model that
            is about to move there.
        total: of the device.
        activation_bytes: at most, of all activations that are alive at once in a call; None where no graph is known yet.
    """

    device: str
    free: int
    total: int
    activation_bytes: int | None

    @property
    def margin(self) -> int:
        """Bytes that "auto" leaves free."""
        return int(MARGIN * self.total)

    @property
    def room(self) -> int:
        """Bytes that "auto" has for weights; 0 where nothing is left."""
        left = self.free - self.margin
        if self.activation_bytes is None:
            return max(0, int(UNKNOWN * left))
        return max(0, left - self.activation_bytes)

    def __str__(self) -> str:
        activations = (
            f"half of that for activations, which no graph tells yet: a share of {UNKNOWN:.0%} is for weights"
            if self.activation_bytes is None
            else f"less {format_bytes(self.activation_bytes)} that activations may take"
        )
        return (
            f"{format_bytes(self.free)} free of {format_bytes(self.total)} on {self.device}, less a margin of "
            f"{format_bytes(self.margin)} ({MARGIN:.0%} of the device), {activations}: {format_bytes(self.room)}"
        )
