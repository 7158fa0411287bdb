"""What is running: recorded with a training, and compared when it goes on."""

import logging
import platform
from importlib import metadata

import torch

import paceline
from paceline.durable.code import source_hash

_LOG = logging.getLogger(__name__)


def software() -> dict[str, str]:
    """Versions, a hash of the package's own source, and the machine, by name."""
    return {
        "paceline": paceline.__version__,
        "source": source_hash(),
        "torch": str(torch.__version__),
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def tell_drift(saved: dict[str, str]) -> None:
    """Warn of everything that is not as it was when the training began."""
    for name, value in software().items():
        if saved.get(name) != value:
            _LOG.warning("%s was %s when this training began, now %s", name, saved.get(name), value)
