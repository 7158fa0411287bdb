"""What an extraction runs on, without loading any of it."""

import importlib.metadata
import platform

import paceline
from paceline.durable.code import source_hash
from paceline.recipe.schema import TargetRecipe

IMPORTED = "states"
"""Among what a session ran on: whose states it took over, where it computed none."""


def software(target: TargetRecipe) -> dict[str, str]:
    """Versions, a hash of the package's own source, machine and devices, by name."""
    return {
        "paceline": paceline.__version__,
        "source": source_hash(),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": "cuda" if target.devices else target.device.partition(":")[0],
    }
