"""The store behind a url."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from paceline.durable.errors import UserError
from paceline.durable.object_store import ObjectStore
from paceline.durable.store import LocalStore, MemoryStore, Store
from paceline.durable.store_options import check_options
from paceline.durable.store_words import OBJECT_SCHEMES


def open_store(url: str, options: Mapping[str, str] | None = None) -> Store:
    """The store at a folder, `file://`, `s3://bucket/prefix`, `gs://`, `az://` or `memory:`.

    Nothing is read or written yet. Raises UserError for another kind of url, for options that
    name secrets (they belong into the environment), that the store does not know, or that a
    folder has no use for.
    """
    options = options or {}
    check_options(options)
    scheme = _scheme(url)
    if scheme in OBJECT_SCHEMES:
        if not urlsplit(url).netloc:
            raise UserError(f"{url}: names no bucket; write {scheme}://bucket/prefix")
        return ObjectStore(url, options)
    if options:
        raise UserError(f"{url}: only object stores have options, not {', '.join(options)}")
    if scheme == "memory":
        return MemoryStore()
    return LocalStore(local_path(url))


def is_local(url: str) -> bool:
    """Whether the store is a folder of this machine. Raises UserError as `open_store`."""
    return _scheme(url) in ("", "file")


def local_path(url: str) -> Path:
    """The folder of a path or a `file://` url. Raises UserError for what is neither."""
    if not is_local(url) or not url:
        raise UserError(f"{url!r} is not a folder")
    if not url.startswith("file:"):
        return Path(url)
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise UserError(f"{url}: write file:///absolute/path")
    return Path(unquote(parts.path))


def _scheme(url: str) -> str:
    """Empty for a folder."""
    if url.startswith("memory:"):
        return "memory"
    if url.startswith("file:"):
        return "file"
    if "://" not in url:
        return ""
    scheme = urlsplit(url).scheme
    if scheme not in OBJECT_SCHEMES:
        raise UserError(
            f"{url}: no store of this kind; use a folder, file://, "
            f"{', '.join(f'{name}://' for name in OBJECT_SCHEMES)} or memory:"
        )
    return scheme
