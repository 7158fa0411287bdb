"""The parts of a tokenizer folder that a drafter's config records, read without a tokenizer."""

import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

import msgspec

from paceline.durable.errors import RecipeError
from paceline.recipe.fingerprint import digest_file

RENDERED_BY = "rendered_by"
"""Key of `rendering_files` in the numbers of `prepare`."""

_LARGEST = 256 << 20
"""Bytes; a larger file holds weights."""


def rendering_files(folder: Path, template_file: str | None = None) -> dict[str, str]:
    """Digests of the files that template, tokenizer and end tokens follow from.

    These are all files of a model folder, those of its additional templates included, that are
    not large, and the template that stands in for its own; the version of the library that reads
    them is among them. Equal digests mean equal tokens, and looking at them takes no library.
    """
    files = [*folder.glob("*"), *folder.glob("additional_chat_templates/*")]
    digests = {
        path.relative_to(folder).as_posix(): digest_file(path)
        for path in sorted(files)
        if path.is_file() and path.stat().st_size <= _LARGEST
    }
    if template_file is not None:
        digests["corpus.template_file"] = digest_file(Path(template_file))
    return {**digests, "transformers": importlib.metadata.version("transformers")}


def template_digest(folder: Path, template_file: str | None = None) -> str:
    """32 hex digits of the chat template's text; of the empty text where there is none.

    `template_file` stands in for the folder's own. Raises RecipeError where it cannot be read.
    """
    text = chat_template(folder) if template_file is None else read_template(template_file)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_template(template_file: str) -> str:
    """The text of a chat template. Raises RecipeError where it cannot be read."""
    try:
        return Path(template_file).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise RecipeError(
            f"corpus.template_file: {template_file}: cannot be read ({error}). Name a file with a "
            "chat template (Jinja)."
        ) from error


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
