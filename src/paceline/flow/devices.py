"""Which GPU a worker process sees."""

from collections.abc import Mapping

from paceline.durable.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def device_environment(device: int, environment: Mapping[str, str]) -> dict[str, str]:
    """What a worker's environment needs so that GPU `device` is all it sees, as its first.

    Devices are counted as this process sees them: where `environment` already has a list, `device`
    is a place in that list. Raises UserError where the list is shorter.
    """
    listed = environment.get(VISIBLE)
    if listed is None:
        return {VISIBLE: str(device)}
    names = []
    for name in (part.strip() for part in listed.split(",")):
        # CUDA reads no further than the first entry that names nothing.
        if name in ("", "-1"):
            break
        names.append(name)
    if device >= len(names):
        raise UserError(
            f"target.devices names GPU {device}, and {VISIBLE}={listed} leaves "
            f"{len(names)} of them, counted from 0. Change one of the two."
        )
    return {VISIBLE: names[device]}
