"""Tiny random targets for tests, in real Transformers folders.

>>> folder = tiny_model("llama", tmp_path / "target")

Every folder has a byte-level ChatML tokenizer where `vocab` has room for its 259 ids: ids 0..255
are bytes, 256 is `<|im_start|>`, 257 is `<|im_end|>` (the end token), 258 is `<|endoftext|>` (the
padding token); the rest are padding rows.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

IM_START, IM_END, END_OF_TEXT = 256, 257, 258
TOKENIZER_SIZE = 259
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
}
TINY_KINDS = tuple(_KINDS)
_LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXTRA: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen3_5": {
        **_LINEAR,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
    "qwen3_next": {
        **_LINEAR,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "smollm3": {"pad_token_id": None, "bos_token_id": None},
}


def tiny_config(
    kind: str, *, vocab: int = 320, layers: int = 6, hidden: int = 32, **overrides: Any
) -> Any:
    """A Transformers config of `kind`, one of TINY_KINDS; `overrides` are config keys."""
    config, _ = _KINDS[kind]
    values: dict[str, Any] = {
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "pad_token_id": None,  # given, its embedding row would start as zeros
        "eos_token_id": min(IM_END, vocab - 1),
        **_EXTRA.get(kind, {}),
        **overrides,
    }
    if kind == "qwen2":
        values.pop("head_dim")
    return config(**values)


def tiny_model(
    kind: str,
    folder: Path,
    *,
    seed: int = 0,
    vocab: int = 320,
    layers: int = 6,
    hidden: int = 32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Save a random fp32 model of `kind` (one of TINY_KINDS) and its tokenizer; return `folder`.

    4 heads, 2 key-value heads, head_dim 16 (explicit: not hidden / heads, but for qwen2, which has
    no such key), untied. Norm weights are random as well, so that a norm left out, or taken for
    the other kind, shows. The hybrids alternate three linear layers and one of full attention.
    """
    _, model_class = _KINDS[kind]
    config = tiny_config(kind, vocab=vocab, layers=layers, hidden=hidden, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.add_(0.3 * torch.randn_like(parameter))
    model.generation_config.pad_token_id = min(END_OF_TEXT, vocab - 1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if vocab >= TOKENIZER_SIZE:
        byte_chatml().save_pretrained(folder)
    return folder


def byte_chatml() -> PreTrainedTokenizerFast:
    """The tokenizer of the module's docstring."""
    characters = _byte_characters()
    ids = {character: byte for byte, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _byte_characters() -> list[str]:
    """The character that ByteLevel writes for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shown = {byte: chr(byte) for byte in printable}
    shown |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [shown[byte] for byte in range(256)]
