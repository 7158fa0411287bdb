"""What it takes to average several drafters: nothing on a device, and what it would take there."""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.doctor.plan_facts import Needs
from paceline.doctor.plan_machine import Machine
from paceline.drafter.shape import DrafterShape
from paceline.watch.words import short_bytes


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """Of the drafters of a training."""

    on_device: int
    """Bytes that it takes on a device beside the training: none, whatever the model's size."""
    naive: int
    """Bytes of a second copy of all parameters in fp32, frozen ones too, as it is usually done."""
    naive_fits: bool | None
    """Whether that would fit beside the training; None without a GPU whose size is known."""
    device_bytes: int | None
    """Of the smallest GPU that trains."""
    training: int
    """Bytes that the training takes there."""


def averaging(needs: Needs, machine: Machine, *, drafters: int, is_tied: bool) -> Averaging | None:
    """None of one drafter alone."""
    if drafters < 2:
        return None
    naive = naive_bytes(needs.drafter, is_tied=is_tied)
    stages = [s for s in needs.memory if s.stage == "train" and s.on_device]
    training = max((stage.total("device") for stage in stages), default=0)
    names = [name for stage in stages for name in stage.device.split(", ")]
    has = None
    if names and all(name in machine.gpus for name in names):
        has = min(machine.gpus[name].total for name in names)
    return Averaging(
        on_device=0,
        naive=naive,
        naive_fits=None if has is None else training + naive <= has,
        device_bytes=has,
        training=training,
    )


def naive_bytes(drafter: DrafterShape, *, is_tied: bool) -> int:
    """A copy of all of a drafter's parameters in fp32, those of embedding and lm_head included."""
    return 4 * (drafter.parameters + drafter.frozen_parameters(is_tied=is_tied))


def averaging_lines(found: Averaging | None) -> Iterator[str]:
    """A sentence of the plan."""
    if found is None:
        return
    line = (
        "averaging: 0 bytes on a device, because it is done on the host, one tensor at a time. A "
        f"copy of all parameters in fp32 on the device would be {short_bytes(found.naive)} more"
    )
    if found.device_bytes is not None:
        fits = "fits" if found.naive_fits else "does not fit"
        line += (
            f", which {fits} beside the {short_bytes(found.training)} of the training into "
            f"{short_bytes(found.device_bytes)}"
        )
    yield f"{line}."
