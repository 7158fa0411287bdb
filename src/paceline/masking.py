"""Secrets, taken out of whatever is shown, sent or kept."""

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

_SECRETS = ("secret", "key", "token", "password", "passwd", "credential")
_NO_SECRETS = ("sse_kms_key_id", "sse_bucket_key_enabled")
"""They say with which key of its own a server encrypts, and hold none."""

_USERINFO = re.compile(r"([a-z][a-z0-9+.-]*://)[^/?#\s\"'<>]*@", re.IGNORECASE)
_LOGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s\"'<>]*:[^/?#\s\"'<>]*@", re.IGNORECASE)
_QUERY = re.compile(r"(?<=[?&;])([^=?&;#\s\"'<>]+)=([^&;#\s\"'<>]+)")

_NAMES_A_FILE = ("_file", "_path", "_dir", "_home", "_sock")
_SHORTEST = 8
"""Characters of a value of the environment that is looked for: what is shorter is in many words."""


def names_secret(option: str) -> bool:
    """Whether an option's name is that of a credential, which no recipe may hold."""
    name = option.lower()
    return not name.endswith(_NO_SECRETS) and any(word in name for word in _SECRETS)


def url_holds_secret(text: str) -> bool:
    """Whether a text has a url with a password, a token or a signature in it."""
    return _LOGIN.search(text) is not None or any(map(_signs, _QUERY.finditer(text)))


def masked_text(text: str) -> str:
    """The text without secrets.

    Those are what stands before the host of a url, tokens and signatures in its query, and what
    this process has in variables of its environment that are named for a secret.
    """
    if "://" in text:
        text = _USERINFO.sub(rf"\1{MASK}@", text)
    if "=" in text:
        text = _QUERY.sub(lambda m: f"{m[1]}={MASK}" if _signs(m) else m[0], text)
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and value in text and _is_secret(name):
            text = text.replace(value, MASK)
    return text


def masked(value: Any) -> Any:
    """A plain copy of dataclasses, mappings and sequences, every text of it masked.

    So is the value under any key of a mapping that names a secret. Fields of a dataclass are ours,
    and none holds one, whatever it is called (`mask_token_id`).
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: masked(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): MASK if names_secret(str(k)) else masked(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(item) for item in value]
    return masked_text(value) if isinstance(value, str) else value


def masked_texts(value: Any) -> Any:
    """JSON values with every text masked and all else as it is, whatever the keys are called."""
    if isinstance(value, dict):
        return {k: masked_texts(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked_texts(item) for item in value]
    return masked_text(value) if isinstance(value, str) else value


def _signs(found: re.Match[str]) -> bool:
    name = found[1].lower()
    return found[2] != MASK and (names_secret(name) or name == "sig" or "signature" in name)


def _is_secret(variable: str) -> bool:
    return names_secret(variable) and not variable.lower().endswith(_NAMES_A_FILE)
