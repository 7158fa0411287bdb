"""ByteChatML of cases.md: one token per character, `S` and `E` special, no generation markers."""

import string
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

START = "<|im_start|>"
END = "<|im_end|>"
UNKNOWN = "<|unk|>"

CHATML = (
    "{%- if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{%- if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{%- endif %}"
    "{{ '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)

ALTERNATING = (
    "{%- for m in messages %}"
    "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{%- endif %}{%- endfor %}" + CHATML
)
"""Raises on consecutive roles and on a conversation that the user does not open."""

THINKING = (
    "{%- for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{%- if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
"""Renders an answer with an empty thought, and the same turn in the history without one."""


def byte_chatml(template: str = CHATML, extra: str = "äöüß🙂中") -> PreTrainedTokenizerFast:
    """The fixture as a real tokenizer: id 0 is S, 1 is E, 2 unknown, then one per character."""
    characters = string.printable + extra
    vocabulary = {token: i for i, token in enumerate([START, END, UNKNOWN, *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=START,
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def merging_chatml(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose only merges join runs of two and three line feeds (T-07)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    feed = "Ċ"
    vocabulary = {token: i for i, token in enumerate([START, END, *alphabet, feed * 2, feed * 3])}
    core = Tokenizer(models.BPE(vocabulary, [(feed, feed), (feed * 2, feed)]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=START,
        eos_token=END,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Any | None = None) -> Path:
    """Write a tokenizer as a target folder has it; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_chatml()).save_pretrained(folder)
    return folder


def turns(text: str) -> list[dict[str, Any]]:
    """`"u:hi|a:ok|s:x"` as messages."""
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    return [{"role": roles[part[0]], "content": part[2:]} for part in text.split("|") if part]
