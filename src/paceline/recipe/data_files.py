"""Which files a data set's path stands for: a file, a folder, or a data set of the hub.

A folder stands for every file of data in it, links followed, in the order of their names; one that
`datasets` has saved, for the files that it lists. Hidden files, documentation and code in it are
passed over.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from paceline.durable.errors import DataError
from paceline.recipe.fingerprint import digest_file
from paceline.recipe.hub import is_hub, local_hub, parse_hub, resolve_hub

ROW_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
"""Files of rows."""
TEXT_SUFFIXES = (".txt", ".md")
"""Plain text; in a folder that has rows too, such files are documentation."""
PACKED_SUFFIXES = (".gz", ".zst")
"""What files of lines and arrays may be compressed with."""
_PACKED = (".jsonl", ".ndjson", ".json", ".txt")

_OTHER_DATA = (
    *PACKED_SUFFIXES, ".csv", ".tsv", ".bz2", ".xz", ".lz4", ".zip", ".7z", ".tar", ".tgz",
    ".feather", ".orc", ".avro", ".pkl", ".pickle", ".npy", ".npz", ".xlsx",
)  # fmt: skip
"""Files of data that cannot be read: passed over, a folder would be less than it looks."""

_ABOUT = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""What `datasets` writes beside the data, about them."""


_LISTS = ("dataset_dict.json", "state.json")
"""Those that say which files are the data."""

_NO_PROSE = ("readme", "license", "licence", "changelog", "notice", "citation")
"""How the names of texts about the data begin."""


def data_files(path: str) -> tuple[Path, ...]:
    """The files, at least one, in the order in which their rows are read.

    Raises DataError where there is nothing, or nothing that can be read.
    """
    return tuple(file for _, file in _named(path))


def unread_files(path: str) -> tuple[str, ...]:
    """Files of a folder that stand beside its data and are not read, hidden ones apart.

    None for a file, and for data sets of the hub and of `datasets`, which list theirs. Raises
    DataError as `data_files` does.
    """
    folder = Path(path)
    if is_hub(path) or not folder.is_dir() or any((folder / name).is_file() for name in _LISTS):
        return ()
    read = {name for name, _ in _named(path)}
    return tuple(name for name in sorted(_below(folder)) if name not in read)


def is_text(name: str) -> bool:
    """Whether a file of that name would be read as text, where it is all that there is."""
    return _is_data(name, TEXT_SUFFIXES) and not Path(name).name.lower().startswith(_NO_PROSE)


def data_digest(path: str) -> str:
    """Of one file its checksum and size, of several 32 hex digits over theirs and their names.

    Where a folder lies is no part of it. Raises DataError as `data_files` does.
    """
    files = _named(path)
    if len(files) == 1:
        return digest_file(files[0][1])
    each = [(name, digest_file(file)) for name, file in files]
    return hashlib.sha256(msgspec.json.encode(each)).hexdigest()[:32]


def data_name(path: str) -> str:
    """What a data set is called after its path, its suffixes left out; empty for an empty path."""
    if is_hub(path):
        return Path(parse_hub(path).name).name
    name = Path(path).name
    for suffixes in (PACKED_SUFFIXES, (*ROW_SUFFIXES, *TEXT_SUFFIXES)):
        name = _without(name, suffixes)
    return name


def data_path(path: str) -> Path | None:
    """Where it lies on this machine; None for a data set that only the hub has."""
    if not is_hub(path):
        return Path(path)
    return local_hub(path)


def path_problem(path: str) -> str | None:
    """Why nothing can be read there, as the end of a sentence; None where something can be.

    Looks at names only, and never at the hub.
    """
    if is_hub(path):
        try:
            parse_hub(path)
        except DataError as error:
            return str(error)
        folder = local_hub(path)
        return None if folder is None or folder.is_dir() else "no such folder"
    place = Path(path)
    if not place.exists():
        return "no such file"
    try:
        _named(path)
    except DataError as error:
        return str(error).removeprefix(f"{path}: ").removesuffix(".")
    return None


def _without(name: str, suffixes: tuple[str, ...]) -> str:
    found = next((s for s in suffixes if name.lower().endswith(s) and len(name) > len(s)), "")
    return name[: len(name) - len(found)]


def _named(path: str) -> list[tuple[str, Path]]:
    """Files with the names that they have below the path."""
    if is_hub(path):
        return resolve_hub(path)
    place = Path(path)
    if place.is_dir():
        return _of_folder(place)
    if not place.is_file():
        raise DataError(f"{path}: no such file. Check corpus.sources in the recipe.")
    if not _is_data(place.name, (*ROW_SUFFIXES, *TEXT_SUFFIXES)):
        raise DataError(
            f"{path}: unknown form {place.suffix!r}. Sources are {', '.join(ROW_SUFFIXES)} and "
            f"{', '.join(TEXT_SUFFIXES)} files, packed ones ({', '.join(PACKED_SUFFIXES)}), or "
            "folders of them (unpack or convert this one)."
        )
    return [(place.name, place)]


def _is_data(name: str, suffixes: tuple[str, ...]) -> bool:
    bare = _without(name.lower(), PACKED_SUFFIXES)
    allowed = suffixes if bare == name.lower() else [s for s in suffixes if s in _PACKED]
    return any(bare.endswith(suffix) for suffix in allowed)


def _of_folder(folder: Path) -> list[tuple[str, Path]]:
    if (folder / "dataset_dict.json").is_file():
        return _of_splits(folder)
    if (folder / "state.json").is_file():
        return list(_saved(folder, folder))
    every = sorted(_below(folder))
    readable = (*ROW_SUFFIXES, *TEXT_SUFFIXES)
    for name in every:
        if name.lower().endswith(_OTHER_DATA) and not _is_data(name, readable):
            raise DataError(
                f"{folder}: {name} in it is of a form that is not read. Convert it, move it away, "
                "or name the files that are meant one by one."
            )
    for suffixes in (ROW_SUFFIXES, TEXT_SUFFIXES):
        found = [(name, folder / name) for name in every if _is_data(name, suffixes)]
        if found:
            return found
    has = f" It has {', '.join(every[:4])}." if every else " It is empty."
    raise DataError(
        f"{folder}: a folder without data: no {', '.join((*ROW_SUFFIXES, *TEXT_SUFFIXES))} file is "
        f"in it.{has}"
    )


def _below(folder: Path) -> Iterator[str]:
    """The files, links followed. Raises DataError for what looks like data and cannot be read."""
    waiting = [(folder, frozenset({folder.resolve()}))]
    while waiting:
        here, above = waiting.pop()
        for path in _listed(here):
            if path.name.startswith((".", "_")) or path.name in _ABOUT:
                continue
            if path.is_dir():
                # What leads back to a folder that it stands in has nothing of its own.
                if (real := path.resolve()) not in above:
                    waiting.append((path, above | {real}))
            elif path.is_file():
                yield path.relative_to(folder).as_posix()
            elif _is_data(path.name, (*ROW_SUFFIXES, *TEXT_SUFFIXES)):
                what = "a link that leads nowhere" if path.is_symlink() else "no file of a disk"
                raise DataError(f"{path}: {what}. Mend it, or move it out of {folder}.")


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be listed ({error.strerror}). Allow it to be read, or move it away."
        ) from error


def _of_splits(folder: Path) -> list[tuple[str, Path]]:
    splits = _json(folder / "dataset_dict.json").get("splits")
    if not isinstance(splits, list) or not splits:
        raise DataError(
            f"{folder / 'dataset_dict.json'}: lists no splits. Save the data set again."
        )
    if len(splits) == 1:
        return list(_saved(folder, folder / str(splits[0])))
    if "train" not in splits:
        raise DataError(
            f"{folder}: a saved data set of {len(splits)} splits without one called `train`: name "
            f"the folder of the one that you mean ({', '.join(map(str, splits))})."
        )
    return list(_saved(folder, folder / "train"))


def _saved(root: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """The files of a data set that `save_to_disk` wrote, in its own order."""
    listed = _json(folder / "state.json").get("_data_files")
    if not isinstance(listed, list) or not listed:
        raise DataError(f"{folder / 'state.json'}: lists no files. Save the data set again.")
    for entry in listed:
        path = folder / str(entry.get("filename") if isinstance(entry, dict) else entry)
        if not path.is_file():
            raise DataError(
                f"{path}: is missing, and state.json lists it. Save the data set again."
            )
        yield path.relative_to(root).as_posix(), path


def _json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}). Save the data set again.") from error
