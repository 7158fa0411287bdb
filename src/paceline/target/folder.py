"""A Transformers model folder, read without Transformers: config, weight files, tokenizer size."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec

from paceline.durable.checksum import Around, crc64_file, crc64_hex
from paceline.durable.errors import TargetError
from paceline.recipe.fingerprint import fingerprint, flatten
from paceline.target.families import FAMILIES, Config, Family

_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
_MISSING = object()


class ModelFolder:
    """Opens a folder. Raises TargetError where it is none, or of a family not supported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outer = _read_json(path / "config.json")
        self.config: Config = self.outer.get("text_config") or self.outer
        self.model_type: str = self.outer.get("model_type", "")
        family = FAMILIES.get(self.model_type)
        if family is None:
            raise TargetError(
                f"{path / 'config.json'}: model_type {self.model_type!r} is not supported. "
                f"Supported: {', '.join(sorted(FAMILIES))}."
            )
        self.family: Family = family

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """A key of the text config, where null counts as absent; absent needs a default."""
        value = self.config.get(key)
        if value is None:
            value = self.outer.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise TargetError(
                f"{self.path / 'config.json'}: the key {key!r} is missing. "
                "The folder is incomplete: fetch the target again."
            )
        return default

    def generation(self) -> dict[str, Any]:
        """generation_config.json; empty where there is none."""
        path = self.path / "generation_config.json"
        return _read_json(path) if path.is_file() else {}

    def weights(self) -> dict[str, Path]:
        """Tensor name to file of a sharded checkpoint; of a single one `{"": file}`.

        Raises TargetError where files are missing, or are not safetensors.
        """
        single = self.path / "model.safetensors"
        if single.is_file():
            return {"": single}
        index = self.path / "model.safetensors.index.json"
        if not index.is_file():
            raise TargetError(
                f"{self.path}: neither {single.name} nor {index.name}. "
                "Paceline reads safetensors only: convert the target."
            )
        files = {name: self.path / file for name, file in _read_json(index)["weight_map"].items()}
        for file in sorted(set(files.values())):
            if not file.is_file():
                raise TargetError(f"{file}: listed in {index.name}, but missing. Fetch it again.")
        return files

    def tokenizer_size(self) -> int | None:
        """Highest token id plus one, from tokenizer.json; None where there is no such file."""
        path = self.path / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            tokenizer = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise TargetError(f"{path}: not a tokenizer ({error}). Fetch it again.") from error
        vocabulary = tokenizer.model.vocab
        top = max(vocabulary.values(), default=-1) if isinstance(vocabulary, dict) else (
            len(vocabulary) - 1
        )  # fmt: skip
        return 1 + max([top, *(token.id for token in tokenizer.added_tokens)])

    def identity(self, *, around: Around = nullcontext) -> str:
        """32 hex digits over the bytes of every weight file and the config that shapes them."""
        fields = {
            f"weights.{file.name}": (
                f"{crc64_hex(crc64_file(file, around=around))}-{file.stat().st_size}"
            )
            for file in set(self.weights().values())
        }
        config = flatten(self.outer, "config")
        return fingerprint(
            fields | {k: v for k, v in config.items() if k.rpartition(".")[2] not in _VOLATILE}
        )


class _TokenizerModel(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _AddedToken(msgspec.Struct):
    id: int


class _TokenizerFile(msgspec.Struct):
    model: _TokenizerModel
    added_tokens: list[_AddedToken] = []


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise TargetError(f"{path}: no such file. target.path must name a Transformers folder.")
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise TargetError(f"{path}: not a JSON object ({error}). Fetch it again.") from error
