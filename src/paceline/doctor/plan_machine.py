"""What this machine has: memory, and the GPUs that the recipe names."""

from dataclasses import dataclass

import psutil

from paceline.doctor.group_memory import group_memory
from paceline.recipe.online import is_on_cpu


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes."""

    total: int
    """Of the machine, or what this container may have of it."""
    available: int
    """Without the page cache, which gives way."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU that torch sees."""

    name: str
    total: int
    """Bytes of its memory."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where the plan was made."""

    host: HostMemory
    gpus: dict[str, Gpu]
    """By `cuda:0`; those of the recipe's that are visible here."""
    without_gpus: str = ""
    """Why a GPU of the recipe is not visible; empty where all are, or none is asked for."""


def read_machine(devices: tuple[str, ...]) -> Machine:
    """Look at this machine; torch is loaded only where `devices` names a GPU."""
    wanted = [device for device in devices if not is_on_cpu(device)]
    gpus, why = _gpus(wanted) if wanted else ({}, "")
    return Machine(host=_host(), gpus=gpus, without_gpus=why)


def _host() -> HostMemory:
    memory, group = psutil.virtual_memory(), group_memory()
    total, available = memory.total, memory.available
    if group is None:
        return HostMemory(total=total, available=available)
    return HostMemory(total=min(total, group.limit), available=min(available, group.free))


def _gpus(wanted: list[str]) -> tuple[dict[str, Gpu], str]:
    import torch

    if not torch.cuda.is_available():
        return {}, f"torch {torch.__version__} sees no CUDA device here"
    found = {}
    there = torch.cuda.device_count()
    for device in wanted:
        number = int(device.partition(":")[2] or 0)
        if number < there:
            of = torch.cuda.get_device_properties(number)
            found[device] = Gpu(name=of.name, total=of.total_memory)
    missing = [device for device in wanted if device not in found]
    why = f"{', '.join(missing)}: torch sees {there} CUDA devices here" if missing else ""
    return found, why
