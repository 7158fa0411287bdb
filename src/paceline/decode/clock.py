"""What the phases of decoding take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Clock:
    """Seconds by phase: CPU time of this process, and wall time, the device's work included."""

    device: torch.device
    cpu: dict[str, float] = field(default_factory=dict)
    wall: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the block as this phase."""
        self._wait()
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            yield
        finally:
            self._wait()
            self.cpu[phase] = self.cpu.get(phase, 0.0) + time.process_time() - cpu
            self.wall[phase] = self.wall.get(phase, 0.0) + time.perf_counter() - wall

    def _wait(self) -> None:
        """A kernel that has only been queued would be counted in the phase after its own."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
