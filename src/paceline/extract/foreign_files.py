"""Files of hidden states that other tools wrote, one sample each: found, and read safely.

SpecForge (`scripts/prepare_hidden_states.py`): `rows_<a>-<b>/data_<i>.ckpt`, or `.ckpt.gz`, by
`torch.save`, with `input_ids` [T] and, for EAGLE-3, `aux_hidden_state` [1, T, K * H] and
`hidden_state` [1, T, H]; for its DFlash family `hidden_states` [T or 1 x T, K * H] and perhaps
`target_last_hidden_states`. Samples of a batch may be padded behind with token 0.

speculators: `hs_<i>.safetensors` as vLLM writes them, with `token_ids` [T] and `hidden_states`
[T, S, H]; before that `data_<i>.pt` by `torch.save`, with `input_ids` [T] and a list of S tensors
[T, H] as `hidden_states`.

Nothing in a pickle is ever run: torch reads plain tensors and containers alone.
"""

import gzip
import io
import os
import pickle
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from paceline.durable.errors import UserError

Tool = Literal["specforge", "speculators"]
Kind = Literal["ckpt", "safetensors", "pt"]

SUFFIXES: dict[Tool, dict[Kind, tuple[str, ...]]] = {
    "specforge": {"ckpt": (".ckpt", ".ckpt.gz")},
    "speculators": {"safetensors": (".safetensors",), "pt": (".pt",)},
}
"""What the files' names end with, by tool and kind."""

DAMAGED = "cut off or damaged"
UNSAFE = "asks for more than plain tensors"
OTHER_FORMAT = "not of the format"
LOSSY = "fp8 states, too coarse"
NOT_FINITE = "states that are not finite"
NO_ACCESS = "cannot be opened"
AFTER_ALL = "cannot be used after all"

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_FLOAT_NAMES = ("BF16", "F16", "F32")
_INTEGERS = (torch.int64, torch.int32)
_ZIP = b"PK\x03\x04"
_BLOCK = 1 << 20


class Unreadable(Exception):
    """A file that cannot be used."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason} ({detail})")
        self.reason = reason
        """One of the constants above."""
        self.detail = detail
        """What is wrong with this very file."""


@dataclass(frozen=True)
class Cache:
    """The files of a folder that one tool wrote."""

    tool: Tool
    kind: Kind
    root: Path
    files: tuple[Path, ...]
    others: int
    """Files of other names, passed by."""

    @property
    def pads(self) -> bool:
        """Whether token ids may end with padding, token 0."""
        return self.tool == "specforge"

    def name(self, index: int) -> str:
        """A file as it is called in messages."""
        path = self.files[index]
        return str(path.relative_to(self.root)) if path != self.root else path.name


@dataclass(frozen=True)
class Shape:
    """What a file has for every token."""

    slots: int
    """Hidden states beside a last one with a name of its own."""

    has_last: bool
    """Whether it has one."""

    is_eagle3: bool = False
    """Whether a SpecForge file is one of its EAGLE-3 caches."""


@dataclass(frozen=True, eq=False)
class ForeignSample:
    """A file's content; tensors may be views of the file."""

    input_ids: npt.NDArray[np.int64]
    """int64 [T]."""

    slots: tuple[torch.Tensor, ...]
    """S tensors [T, H] in the file's order and type."""

    last: torch.Tensor | None
    """[T, H], where it has a name of its own."""

    is_eagle3: bool = False

    @property
    def shape(self) -> Shape:
        """Its shape."""
        return Shape(len(self.slots), self.last is not None, self.is_eagle3)


def find_cache(source: Path, tool: Tool) -> Cache:
    """The tool's files below `source`, or that file alone, in the order of their names.

    Raises UserError where there is none, and for two kinds side by side.
    """
    suffixes: Mapping[Kind, tuple[str, ...]] = SUFFIXES[tool]
    if not source.exists():
        raise UserError(f"{source}: no such folder. Give the one that {tool} wrote.")
    found: dict[Kind, list[Path]] = {kind: [] for kind in suffixes}
    others = 0
    for path in _walk(source):
        of_kind = next((found[k] for k, ends in suffixes.items() if path.name.endswith(ends)), None)
        if of_kind is None:
            others += 1
        else:
            of_kind.append(path)
    kinds: list[Kind] = [kind for kind, paths in found.items() if paths]
    names = " or ".join(f"*{end}" for ends in suffixes.values() for end in ends)
    if not kinds:
        raise UserError(f"{source}: no file of {tool} ({names}) is below it.")
    if len(kinds) > 1:
        raise UserError(
            f"{source}: has {' and '.join(f'.{k}' for k in kinds)} files, which count layers in "
            "different ways. Import them one after the other, from folders of their own."
        )
    return Cache(tool, kinds[0], source, tuple(found[kinds[0]]), others)


def read_ids(path: Path, kind: Kind, hidden_size: int) -> tuple[npt.NDArray[np.int64], Shape]:
    """Token ids and shape of a file; its states are not read where its format allows that.

    Raises Unreadable.
    """
    if kind == "safetensors":
        return _peek_safetensors(path, hidden_size)
    sample = read_sample(path, kind, hidden_size)
    return sample.input_ids, sample.shape


def read_sample(path: Path, kind: Kind, hidden_size: int, *, verify: bool = False) -> ForeignSample:
    """A file's content. With `verify` the checksums that torch left in it are checked.

    Raises Unreadable.
    """
    if kind == "safetensors":
        return _read_safetensors(path, hidden_size)
    content = _load_pickled(path, verify=verify)
    if kind == "pt":
        return _speculators_sample(content, hidden_size)
    return _specforge_sample(content, hidden_size)


def _walk(source: Path) -> Iterator[Path]:
    if source.is_file():
        yield source
        return
    for folder, folders, names in os.walk(source):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            # A pipe would never answer.
            if path.is_file():
                yield path


def _specforge_sample(content: Mapping[str, Any], hidden_size: int) -> ForeignSample:
    is_eagle3 = "hidden_state" in content or "aux_hidden_state" in content
    names = (
        ("aux_hidden_state", "hidden_state")
        if is_eagle3
        else ("hidden_states", "target_last_hidden_states")
    )
    ids = _ids(content, "input_ids")
    wide, last = (_states(content, name, len(ids)) for name in names)
    slots: tuple[torch.Tensor, ...] = ()
    if wide is not None:
        if wide.shape[1] % hidden_size:
            _other(
                f"`{names[0]}` has {wide.shape[1]} values a token, no multiple of the target's "
                f"{hidden_size}"
            )
        slots = wide.view(len(ids), -1, hidden_size).unbind(1)
    if last is not None and last.shape[1] != hidden_size:
        _other(f"`{names[1]}` has {last.shape[1]} values a token, the target {hidden_size}")
    if not slots and last is None:
        _other("it has no hidden states")
    return ForeignSample(ids, slots, last, is_eagle3)


def _speculators_sample(content: Mapping[str, Any], hidden_size: int) -> ForeignSample:
    ids = _ids(content, "input_ids")
    states = content.get("hidden_states")
    if not isinstance(states, list | tuple) or not states:
        _other("`hidden_states` is no list of tensors")
    if "hidden_states_scales" in content:
        _lossy()
    slots = []
    for number, state in enumerate(states):
        name = f"hidden_states[{number}]"
        slot = _states({name: state}, name, len(ids))
        if slot is None or slot.shape[1] != hidden_size:
            _other(f"`{name}` is not [{len(ids)}, {hidden_size}]")
        slots.append(slot)
    return ForeignSample(ids, tuple(slots), None)


def _ids(content: Mapping[str, Any], name: str) -> npt.NDArray[np.int64]:
    ids = content.get(name)
    if not _is_plain(ids, _INTEGERS):
        _other(f"it has no token ids as `{name}`")
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or not len(ids):
        _other(f"`{name}` is {list(ids.shape)}, not one sequence")
    # A copy: the file is let go.
    return ids.to(torch.int64, copy=True).numpy()


def _states(content: Mapping[str, Any], name: str, tokens: int) -> torch.Tensor | None:
    """[T, W]; None where the file has none."""
    states = content.get(name)
    if states is None:
        return None
    if isinstance(states, torch.Tensor) and states.is_floating_point() and states.itemsize == 1:
        _lossy()
    if not _is_plain(states, _FLOATS):
        _other(f"`{name}` is no tensor of hidden states")
    if states.dim() == 3 and states.shape[0] == 1:
        states = states[0]
    if states.dim() != 2 or len(states) != tokens or not states.shape[1]:
        _other(f"`{name}` is {list(states.shape)} for {tokens} token ids")
    return states


def _is_plain(value: Any, dtypes: Sequence[torch.dtype]) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and value.dtype in dtypes
    )


def _load_pickled(path: Path, *, verify: bool) -> Mapping[str, Any]:
    try:
        # Another pickle protocol draws a warning; it is read, or it is not.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = _load(path, verify=verify)
    except Unreadable:
        raise
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        if name:
            raise Unreadable(UNSAFE, f"{name[1]}; nothing of it was run") from error
        raise Unreadable(OTHER_FORMAT, "no file of plain tensors by torch.save") from error
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise Unreadable(DAMAGED, str(error) or "it ends too early") from error
    except (PermissionError, FileNotFoundError) as error:
        raise Unreadable(NO_ACCESS, error.strerror or str(error)) from error
    except Exception as error:
        # A file may be wrong in any way; it is named and counted, and the others go on.
        first = next(iter(str(error).splitlines()), "")
        raise Unreadable(DAMAGED, f"{type(error).__name__}: {first[:200]}") from error
    if not isinstance(content, dict):
        _other(f"it holds a {type(content).__name__}, not a dict of tensors")
    return content


def _load(path: Path, *, verify: bool) -> Any:
    safely: dict[str, Any] = {"weights_only": True, "map_location": "cpu"}
    if path.name.endswith(".gz"):
        with gzip.open(path) as file:
            # Decompressing checks a checksum of its own.
            return torch.load(io.BytesIO(file.read()), **safely)
    with path.open("rb") as file:
        is_zip = file.read(len(_ZIP)) == _ZIP
    if is_zip and verify:
        _verify_zip(path)
    return torch.load(path, mmap=is_zip, **safely)


def _verify_zip(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            # Zero: torch was told to write none.
            if not entry.CRC:
                continue
            try:
                with archive.open(entry) as file:
                    while file.read(_BLOCK):
                        pass
            except zipfile.BadZipFile as error:
                raise Unreadable(DAMAGED, "a checksum does not hold") from error


def _peek_safetensors(path: Path, hidden_size: int) -> tuple[npt.NDArray[np.int64], Shape]:
    with _opened(path) as file:
        ids, slots = _safetensors_head(file, hidden_size)
        return ids, Shape(slots, has_last=False)


def _read_safetensors(path: Path, hidden_size: int) -> ForeignSample:
    with _opened(path) as file:
        ids, _ = _safetensors_head(file, hidden_size)
        return ForeignSample(ids, file.get_tensor("hidden_states").unbind(1), None)


def _safetensors_head(file: Any, hidden_size: int) -> tuple[npt.NDArray[np.int64], int]:
    names = set(file.keys())
    if "hidden_states_scales" in names:
        _lossy()
    if not {"token_ids", "hidden_states"} <= names:
        _other("it lacks `token_ids` or `hidden_states`")
    states = file.get_slice("hidden_states")
    shape, dtype = list(states.get_shape()), states.get_dtype()
    if dtype.startswith("F8"):
        _lossy()
    ids = _ids({"token_ids": file.get_tensor("token_ids")}, "token_ids")
    if dtype not in _FLOAT_NAMES:
        _other(f"`hidden_states` is {dtype}")
    if len(shape) != 3 or shape[0] != len(ids) or shape[2] != hidden_size or not shape[1]:
        _other(f"`hidden_states` is {shape} for {len(ids)} token ids of {hidden_size} values")
    return ids, shape[1]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """`safe_open`, with its errors as Unreadable."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except SafetensorError as error:
        raise Unreadable(DAMAGED, str(error)) from error
    except OSError as error:
        raise Unreadable(NO_ACCESS, error.strerror or str(error)) from error


def _other(detail: str) -> NoReturn:
    raise Unreadable(OTHER_FORMAT, detail)


def _lossy() -> NoReturn:
    raise Unreadable(LOSSY, "they are further from the target's own than any capture may be")
