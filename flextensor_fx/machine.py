"""The machine that numbers were taken on, so that those of another one are not taken for this one's."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import torch

from .errors import ProfileError
from .passes.schedule import format_bytes

_TELLING = ("name", "device", "cores")


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine as far as times depend on it.

    Fields:
        name: of the host.
        device: where compute ran, "cpu" or such as "cuda:0".
        cores: that the process may use.
        memory_bytes: of the whole machine.
        python, torch: their versions.

    Raises:
        ProfileError: fewer cores than 1, or bytes below 0.
    """

    name: str
    device: str
    cores: int
    memory_bytes: int
    python: str
    torch: str

    def __post_init__(self) -> None:
        if self.cores < 1 or self.memory_bytes < 0:
            raise ProfileError(f"Machine: expected cores >= 1 and memory_bytes >= 0, found {self!r}")

    @staticmethod
    def here(device: str = "cpu") -> Machine:
        """This machine and this process, computing on `device`."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        cores = len(os.sched_getaffinity(0))
        return Machine(platform.node(), device, cores, memory, platform.python_version(), str(torch.__version__))

    def unlike(self, other: Machine) -> tuple[str, ...]:
        """The fields in which the two differ so that times taken on one say little about the other: name, device, cores."""
        return tuple(field for field in _TELLING if getattr(self, field) != getattr(other, field))

    def unlike_here(self) -> tuple[str, ...]:
        """`unlike` this machine; the device differs if this machine has none of that type."""
        return self.unlike(Machine.here(self.device if _is_here(self.device) else "cpu"))

    def __str__(self) -> str:
        cores = f"{self.cores} core{'s' * (self.cores != 1)}"
        memory = format_bytes(self.memory_bytes)
        return f"{self.name}, {self.device}, {cores}, {memory}, python {self.python}, torch {self.torch}"


def _is_here(device: str) -> bool:
    kind = device.partition(":")[0]
    if kind == "cpu":
        return True
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == kind
