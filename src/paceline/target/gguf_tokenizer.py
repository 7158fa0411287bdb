"""The tokenizer of a GGUF file, as the files that Transformers and the engines load."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.durable.errors import TargetError

_CONTROL, _USER_DEFINED = 3, 4


@dataclass(frozen=True, kw_only=True)
class GGUFVocabulary:
    """What a GGUF tells of its tokenizer."""

    path: Path
    """The GGUF file, for messages."""
    tokens: list[str]
    """Byte-level BPE tokens in id order."""
    token_types: list[int]
    """GGUF's token types, one per token."""
    merges: list[str]
    """`left right` in rank order."""
    pre_tokenizer: str
    """llama.cpp's name of the splitting rules."""
    special_ids: dict[str, int]
    """Ids of `bos`, `eos`, `pad`, `unk`, as far as named."""
    chat_template: str
    """Jinja; empty where there is none."""

    def token_ids(self, *roles: str) -> dict[str, int]:
        """`<role>_token_id` of the roles that the file names."""
        return {f"{r}_token_id": self.special_ids[r] for r in roles if r in self.special_ids}


def build_tokenizer(vocabulary: GGUFVocabulary, *, max_length: int) -> dict[str, bytes]:
    """File names to bytes: `tokenizer.json` and `tokenizer_config.json` with the chat template.

    Raises TargetError for splitting rules that are not known: guessing them gives other token
    ids than the target was trained on, and nothing would show it.
    """
    split = _PRE_TOKENIZERS.get(vocabulary.pre_tokenizer)
    if split is None:
        raise TargetError(
            f"{vocabulary.path}: pre-tokenizer {vocabulary.pre_tokenizer!r} is not known (known: "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}). Use a Transformers folder of this target."
        )
    merges = [_pair(merge) for merge in vocabulary.merges]
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, fuse_unk=False))
    except Exception as error:
        raise TargetError(
            f"{vocabulary.path}: vocabulary and merges do not fit together ({error})."
        ) from error
    tokenizer.pre_tokenizer = split()
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(vocabulary.tokens, vocabulary.token_types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            special = kind == _CONTROL
            added = AddedToken(token, special=special, normalized=False)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])

    config: dict[str, Any] = {
        # The generic class: those named after a model rebuild the splitting rules from scratch.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **{f"{r}_token": vocabulary.tokens[i] for r, i in vocabulary.special_ids.items()},
    }
    if vocabulary.chat_template:
        config["chat_template"] = vocabulary.chat_template
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n",
    }


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _digits_then_bytes() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _bytes() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {"gpt-2": _bytes, "smollm": _digits_then_bytes}
