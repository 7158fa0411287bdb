"""The target's own tokenizer, from local files alone."""

from pathlib import Path
from typing import Any

from paceline.durable.errors import TargetError
from paceline.recipe.fingerprint import Fields, digest_file

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


def load_tokenizer(folder: Path) -> Any:
    """The Transformers tokenizer. Raises TargetError where the folder has no usable one."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise TargetError(f"{folder}: no usable tokenizer ({error}).") from error


def tokenizer_fields(folder: Path) -> Fields:
    """Digests of the files that map text to ids, for fingerprints."""
    return {
        f"tokenizer.{name}": digest_file(folder / name)
        for name in _FILES
        if (folder / name).is_file()
    }
