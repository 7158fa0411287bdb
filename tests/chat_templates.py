"""Ten kinds of chat template with real tokenizers: each family's structure, in its own words.

A template here writes, keeps and drops what the family's does; texts that only take up room
(tool instructions, default prompts) are shorter.
"""

import json
import string
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_FOLDER = Path(__file__).parent / "chat_templates"
_UNKNOWN = "<|unk|>"
_FEED, _SPACE = "Ċ", "Ġ"
_MERGES = [
    (">", _FEED),
    (">" + _FEED, _FEED),
    (_FEED, _FEED),
    (_FEED * 2, _FEED),
    (_SPACE, "o"),
    (_SPACE + "o", "k"),
    ("]", _SPACE),
]
"""What could reach over a turn's boundary: a tag and its line feeds, line feeds alone, a space
before a word, a bracket and its space."""

TOKENIZERS = ("tagged", "merging", "characters")
"""Byte-level BPE with `<think>` as a token, the same without, and one token per character."""

_THOUGHT_TAGS = ("<think>", "</think>")


@dataclass(frozen=True)
class Family:
    """A template and the tokens that go with it."""

    name: str
    specials: tuple[str, ...]
    eos: str
    ends: tuple[str, ...]
    """What `generation_config.json` stops at."""
    bos: str | None = None
    tags: tuple[str, ...] = ()
    """Added tokens that are not special."""
    edit: tuple[str, str, str] | None = None
    """Another family whose template it is, but for one text in place of another."""

    def tokenizer(self, kind: str = "tagged") -> PreTrainedTokenizerFast:
        core = _characters() if kind == "characters" else _bytes()
        core.add_special_tokens([AddedToken(token, special=True) for token in self.specials])
        tags = [tag for tag in self.tags if kind == "tagged" or tag not in _THOUGHT_TAGS]
        core.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core,
            bos_token=self.bos,
            eos_token=self.eos,
            unk_token=_UNKNOWN if kind == "characters" else None,
            clean_up_tokenization_spaces=False,
        )
        tokenizer.chat_template = self.template()
        return tokenizer

    def template(self) -> str:
        origin, old, new = self.edit or (self.name, "", "")
        return (_FOLDER / f"{origin}.jinja").read_text("utf-8").replace(old, new)

    def save(self, folder: Path, kind: str = "tagged") -> Path:
        """Write tokenizer, template and generation config as a model folder has them."""
        tokenizer = self.tokenizer(kind)
        tokenizer.save_pretrained(folder)
        ends: Any = [tokenizer.convert_tokens_to_ids(end) for end in self.ends]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        return folder


def _characters() -> Tokenizer:
    alphabet = string.printable + "äöüß🙂中｜▁"
    vocabulary = {token: i for i, token in enumerate([_UNKNOWN, *alphabet])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return core


def _bytes() -> Tokenizer:
    merged = [left + right for left, right in _MERGES]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *merged])}
    core = Tokenizer(models.BPE(vocabulary, _MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return core


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TOOL_TAGS = ("<tool_call>", "</tool_call>")
_TOOL_RESULT_TAGS = ("<tool_response>", "</tool_response>")

_R1 = Family(
    "deepseek_r1",
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    eos="<｜end▁of▁sentence｜>",
    ends=("<｜end▁of▁sentence｜>",),
    bos="<｜begin▁of▁sentence｜>",
    tags=("<｜User｜>", "<｜Assistant｜>", *_THOUGHT_TAGS),
)

FAMILIES = {
    family.name: family
    for family in (
        Family(
            "llama31",
            (
                "<|begin_of_text|>",
                "<|end_of_text|>",
                "<|start_header_id|>",
                "<|end_header_id|>",
                "<|eom_id|>",
                "<|eot_id|>",
            ),
            eos="<|eot_id|>",
            ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
            bos="<|begin_of_text|>",
        ),
        Family(
            "qwen25",
            _CHATML,
            eos="<|im_end|>",
            ends=("<|im_end|>", "<|endoftext|>"),
            tags=_TOOL_TAGS,
        ),
        Family(
            "qwen3",
            _CHATML,
            eos="<|im_end|>",
            ends=("<|im_end|>", "<|endoftext|>"),
            tags=_TOOL_TAGS + _TOOL_RESULT_TAGS + _THOUGHT_TAGS,
        ),
        Family(
            "gemma",
            ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
            eos="<eos>",
            ends=("<eos>", "<end_of_turn>"),
            bos="<bos>",
        ),
        Family(
            "mistral",
            (
                "<s>",
                "</s>",
                "[INST]",
                "[/INST]",
                "[TOOL_CALLS]",
                "[AVAILABLE_TOOLS]",
                "[/AVAILABLE_TOOLS]",
                "[TOOL_RESULTS]",
                "[/TOOL_RESULTS]",
            ),
            eos="</s>",
            ends=("</s>",),
            bos="<s>",
        ),
        _R1,
        # Its first template left the opening of the thought to the model.
        replace(_R1, name="deepseek_r1_first", edit=("deepseek_r1", "<think>\\n", "")),
        Family(
            "gpt_oss",
            (
                "<|startoftext|>",
                "<|endoftext|>",
                "<|return|>",
                "<|constrain|>",
                "<|channel|>",
                "<|start|>",
                "<|end|>",
                "<|message|>",
                "<|call|>",
            ),
            eos="<|return|>",
            ends=("<|return|>", "<|endoftext|>", "<|call|>"),
            bos="<|startoftext|>",
        ),
        Family("smollm2", _CHATML, eos="<|im_end|>", ends=("<|im_end|>",), bos="<|im_start|>"),
        Family("unmarked", ("<|endoftext|>",), eos="<|endoftext|>", ends=("<|endoftext|>",)),
    )
}
