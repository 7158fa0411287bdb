"""torch's random state: a part of where a training stands."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from generators of this seed inside; those of CPU and `device` are put back after."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """uint8 state of the CPU's generator, and of the device's where it is a GPU."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Set the generators to what `rng_state` gave; one of another kind of device is left out."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
