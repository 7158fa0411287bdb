"""Single tensors of a target, read from its safetensors without building the model."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from paceline.durable.errors import TargetError
from paceline.target.folder import ModelFolder

PREFIXES = ("model.", "model.language_model.", "language_model.model.")
"""What may stand before a decoder's own tensor names."""


class TensorReader:
    """Reads tensors by name from a single or sharded checkpoint."""

    def __init__(self, folder: ModelFolder | Path) -> None:
        """Reads the names alone. Raises TargetError where weights are missing."""
        folder = ModelFolder(folder) if isinstance(folder, Path) else folder
        self._path = folder.path
        self._files = folder.weights()
        single = self._files.get("")
        if single is not None:
            with _open(single) as file:
                self._files = dict.fromkeys(file.keys(), single)

    def read(
        self, names: Sequence[str], *, dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> torch.Tensor:
        """The tensor under the first of `names` that the checkpoint has.

        Raises TargetError where it has none of them.
        """
        name = next((n for n in names if n in self._files), None)
        if name is None:
            raise TargetError(
                f"{self._path}: the weights have no tensor {names[0]!r} (looked for "
                f"{', '.join(names)}). The folder is incomplete: fetch the target again."
            )
        with _open(self._files[name]) as file:
            return file.get_tensor(name).to(device=device, dtype=dtype)

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """All tensors of decoder layer `index`, fp32, by their names inside the layer."""
        found = {}
        for prefix in PREFIXES:
            start = f"{prefix}layers.{index}."
            for name in self._files:
                if name.startswith(start):
                    found[name.removeprefix(start)] = self.read([name], dtype=torch.float32)
        return found

    def final_norm(self) -> torch.Tensor:
        """Weight [H] of the norm before lm_head, fp32."""
        return self.read([f"{p}norm.weight" for p in PREFIXES], dtype=torch.float32)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise TargetError(f"{path}: not a safetensors file ({error}). Fetch it again.") from error
