"""The parts of a tokenizer folder that a drafter's config records, read without a tokenizer."""

import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

import msgspec

from paceline.recipe.fingerprint import digest_file

RENDERED_BY = "rendered_by"
"""Key of `rendering_files` in the numbers of `prepare`."""

_LARGEST = 256 << 20
"""Bytes; a larger file holds weights."""


def rendering_files(folder: Path) -> dict[str, str]:
    """Digests of the files that template, tokenizer and end tokens follow from.

    These are all files of a model folder, those of its additional templates included, that are
    not large; the version of the library that reads them is among them. Equal digests mean equal
    tokens, and looking at them takes no library.
    """
    files = [*folder.glob("*"), *folder.glob("additional_chat_templates/*")]
    digests = {
        path.relative_to(folder).as_posix(): digest_file(path)
        for path in sorted(files)
        if path.is_file() and path.stat().st_size <= _LARGEST
    }
    return {**digests, "transformers": importlib.metadata.version("transformers")}


def template_digest(folder: Path) -> str:
    """32 hex digits of the chat template's text; of the empty text where there is none."""
    return hashlib.sha256(chat_template(folder).encode()).hexdigest()[:32]


def chat_template(folder: Path) -> str:
    """The default chat template of a model folder; empty where it has none."""
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    template = _json(folder / "tokenizer_config.json").get("chat_template", "")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default", "")
    return template


def special_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids of the special tokens that tokenizer.json adds; empty without such a file."""
    added = _json(folder / "tokenizer.json").get("added_tokens", [])
    return tuple(entry["id"] for entry in added if entry.get("special"))


def _json(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes(), type=dict) if path.is_file() else {}
