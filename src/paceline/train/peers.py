"""What drafters that take the same step add up: counts before it, gradients in it."""

import datetime as dt
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from paceline.objective.terms import SlotCounts

_TIMEOUT = dt.timedelta(minutes=10)
"""For one sum: the slowest drafter's step has to end before it."""


class Peers(Protocol):
    """All drafters of a step, this one included; each of them calls the same in the same order."""

    def counts(self, own: SlotCounts) -> SlotCounts:
        """Of all drafters."""
        ...

    def numbers(self, own: Sequence[float]) -> list[float]:
        """Sums over all drafters."""
        ...

    def gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Sum each parameter's gradient over all drafters, in place."""
        ...


class ProcessGroup:
    """The drafters' processes, through torch.distributed: gloo on CPUs, NCCL on GPUs."""

    def __init__(
        self, port: int, *, rank: int, world: int, name: str, device: torch.device
    ) -> None:
        """Join the group `name` over the store at `port` of this machine; waits for the others."""
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
        self._device = device
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore(name, store),
            rank=rank,
            world_size=world,
            timeout=_TIMEOUT,
        )

    def counts(self, own: SlotCounts) -> SlotCounts:  # noqa: D102
        flat = torch.tensor([*own.valid, *own.counted, own.blocks], device=self._device)
        dist.all_reduce(flat)
        numbers = [int(n) for n in flat.tolist()]
        slots = len(own.valid)
        return SlotCounts(
            valid=tuple(numbers[:slots]),
            counted=tuple(numbers[slots : 2 * slots]),
            blocks=numbers[-1],
        )

    def numbers(self, own: Sequence[float]) -> list[float]:  # noqa: D102
        flat = torch.tensor(own, dtype=torch.float64, device=self._device)
        dist.all_reduce(flat)
        return flat.tolist()

    def gradients(self, parameters: Iterable[torch.Tensor]) -> None:  # noqa: D102
        # One after the other: a buffer of all would be as large as the drafter.
        for parameter in parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)


def open_store() -> TCPStore:
    """The store that the drafters' processes find each other by, at a free port of this machine."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
