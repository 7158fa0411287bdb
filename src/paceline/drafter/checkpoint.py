"""A drafter at rest: `model.safetensors` and `config.json`, nothing pickled."""

from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from paceline.drafter.config import DrafterConfig
from paceline.drafter.dflash import DFlash
from paceline.durable.errors import ShardDamaged, UserError
from paceline.durable.fs import write_atomic
from paceline.recipe.checkpoints import SUMS
from paceline.recipe.fingerprint import digest_file

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def save_drafter(drafter: DFlash, folder: Path) -> None:
    """Write weights in their own dtype and the config, each atomically."""
    state = {name: value.detach().contiguous() for name, value in drafter.state_dict().items()}
    write_atomic(folder / WEIGHTS, save(state, metadata={"format": "pt"}))
    config = msgspec.json.encode(drafter.config)
    write_atomic(folder / CONFIG, msgspec.json.format(config, indent=2))


def read_config(folder: Path) -> DrafterConfig:
    """The config of a saved drafter. Raises UserError where the folder holds none."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"{folder}: no drafter here ({CONFIG} is missing).")
    try:
        return msgspec.json.decode(path.read_bytes(), type=DrafterConfig)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ShardDamaged(f"{path}: not a drafter's config ({error}).") from error


def load_drafter(folder: Path, *, device: str = "cpu") -> DFlash:
    """Rebuild a saved drafter, in eval mode.

    Raises ShardDamaged where names or shapes differ from what the config describes, or the two
    tables of a reduced vocabulary disagree.
    """
    drafter = DFlash(read_config(folder))
    try:
        state = load_file(folder / WEIGHTS, device=device)
    except (OSError, SafetensorError) as error:
        raise ShardDamaged(f"{folder / WEIGHTS}: cannot be read ({error}).") from error
    wanted = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in state.items()}
    if wanted != found:
        names = sorted(wanted.items() ^ found.items())
        raise ShardDamaged(f"{folder / WEIGHTS}: tensors differ from the config: {names[:6]}")
    drafter.load_state_dict(state, assign=True)
    try:
        _ = drafter.vocabulary
    except ValueError as error:
        raise ShardDamaged(f"{folder / WEIGHTS}: {error}.") from error
    drafter.to(torch.device(device))
    return drafter.eval()


def read_sums(folder: Path) -> dict[str, str]:
    """The files of a checkpoint, with size and CRC64NVME. Raises ShardDamaged."""
    try:
        return msgspec.json.decode((folder / SUMS).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise ShardDamaged(f"{folder / SUMS}: cannot be read ({error}).") from error


def check_sums(folder: Path, names: Iterable[str]) -> None:
    """Raise ShardDamaged, naming the file, unless each is as the list of checksums says."""
    sums = read_sums(folder)
    for name in names:
        path = folder / name
        if not path.is_file():
            raise ShardDamaged(f"{path}: missing from the checkpoint.")
        if digest_file(path) != sums.get(name):
            raise ShardDamaged(f"{path}: its checksum does not hold.")
