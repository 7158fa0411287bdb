"""Data sets of the Hugging Face hub, `hf:OWNER/NAME?config=...&split=...&revision=...`.

The library `datasets` (an extra) says which files make up a configuration's split, for a data set
on the hub and for a folder of the same layout (`hf:./folder`); the files themselves are fetched
into the hub's own cache and read by Paceline. Fetching has not been tried against the hub itself:
the tests use folders.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from paceline.durable.errors import DataError

_PREFIX = "hf:"
_KEYS = ("config", "split", "revision")
_REMOTE = "hf://datasets/"


@dataclass(frozen=True, slots=True)
class HubSource:
    """A data set, or a folder of its layout."""

    name: str
    """`OWNER/NAME`, or the folder."""
    config: str | None = None
    split: str = "train"
    revision: str | None = None


def is_hub(path: str) -> bool:
    """Whether a source's path names a data set of the hub."""
    return path.startswith(_PREFIX)


def parse_hub(path: str) -> HubSource:
    """Raises DataError for a name or a key that cannot be."""
    name, _, query = path.removeprefix(_PREFIX).partition("?")
    if not name:
        raise DataError(f"{path}: no data set is named. Write hf:OWNER/NAME.")
    given = dict(parse_qsl(query, keep_blank_values=True))
    unknown = [key for key in given if key not in _KEYS]
    if unknown or (query and not given):
        what = f"unknown key `{unknown[0]}`" if unknown else "nothing follows the `?`"
        raise DataError(f"{path}: {what}. Keys are {', '.join(_KEYS)}, such as ?split=train_sft.")
    return HubSource(
        name=name,
        config=given.get("config") or None,
        split=given.get("split") or "train",
        revision=given.get("revision") or None,
    )


def local_hub(path: str) -> Path | None:
    """The folder that stands for the data set; None where the hub has it."""
    name = parse_hub(path).name
    is_folder = name.startswith((".", "/", "~"))
    return Path(name).expanduser() if is_folder else None


def absolute_hub(path: str) -> str:
    """The same with its folder, if it is one, named from the root."""
    folder = local_hub(path)
    if folder is None:
        return path
    _, mark, query = path.partition("?")
    return f"{_PREFIX}{folder.absolute()}{mark}{query}"


def resolve_hub(path: str) -> list[tuple[str, Path]]:
    """Names and places of the files of a split, fetched where they are not here yet.

    Raises DataError where the extra is missing, the hub has no such data set, configuration or
    split, or cannot be reached.
    """
    source, folder = parse_hub(path), local_hub(path)
    if folder is not None and not folder.is_dir():
        raise DataError(f"{path}: no such folder. Check corpus.sources in the recipe.")
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{path}: data sets of the hub take the package `datasets`: "
            "pip install 'paceline[datasets]'."
        ) from error
    try:
        builder: Any = datasets.load_dataset_builder(
            str(folder) if folder is not None else source.name,
            source.config,
            revision=source.revision,
        )
        splits: Any = builder.config.data_files or {}
    except Exception as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: cannot be resolved: {reason}") from error
    if source.split not in splits:
        names = ", ".join(map(str, splits)) or "none"
        raise DataError(
            f"{path}: no split `{source.split}`, but {names}. Choose one with ?split=NAME."
        )
    return _files(path, folder, list(map(str, splits[source.split])))


def _files(path: str, folder: Path | None, listed: Sequence[str]) -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    for place in listed:
        if folder is not None:
            file = Path(place)
            found.append((file.relative_to(folder.absolute()).as_posix(), file))
            continue
        if not place.startswith(_REMOTE):
            raise DataError(f"{path}: its file {place} is not on the hub, and is not fetched.")
        found.append(_fetched(path, place.removeprefix(_REMOTE)))
    return found


def _fetched(path: str, place: str) -> tuple[str, Path]:
    from huggingface_hub import hf_hub_download

    owner_and_name, _, rest = place.partition("@")
    revision, _, name = rest.partition("/")
    try:
        file = hf_hub_download(owner_and_name, name, repo_type="dataset", revision=revision)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: {name} cannot be fetched: {reason}") from error
    return name, Path(file)
