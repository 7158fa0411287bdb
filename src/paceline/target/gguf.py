"""A Llama GGUF file, turned into a Transformers folder with fp32 weights."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file

from paceline.durable.errors import TargetError
from paceline.durable.fs import PARTIAL, REAL_FS, FileSystem
from paceline.target.gguf_tokenizer import GGUFVocabulary, build_tokenizer

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def convert_gguf(gguf_path: Path, out: Path, *, name: str, fs: FileSystem = REAL_FS) -> None:
    """Write `out`: config, fp32 safetensors, tokenizer with chat template, generation config.

    The weights equal, bit for bit, those that Transformers makes of the same file. The folder
    appears under its name only when whole and durable. `name` is what the target is called from
    then on (`TargetSpec.name`).

    Raises TargetError where the file is not a GGUF, is not of Llama architecture, uses a feature
    that would be lost (rope scaling, experts, an unknown pre-tokenizer), or where `out` exists.
    """
    if out.exists():
        raise TargetError(f"{out}: exists already. Remove it to have {gguf_path.name} converted.")
    source = _Source(gguf_path)
    shape = source.shape()
    tensors = source.tensors(shape)
    vocabulary = source.vocabulary()

    partial = out.with_name(out.name + PARTIAL)
    if partial.exists():
        shutil.rmtree(partial)
    try:
        fs.make_dirs(partial)
        tied = "lm_head.weight" not in tensors
        files = {
            "config.json": _json(_config(shape, vocabulary, name, tied)),
            "generation_config.json": _json(vocabulary.token_ids("bos", "eos", "pad")),
            **build_tokenizer(vocabulary, max_length=shape.max_position),
        }
        for file_name, data in files.items():
            with fs.open_new(partial / file_name) as file:
                fs.write(file, data)
                fs.sync(file)
        weights = partial / "model.safetensors"
        save_file(tensors, weights, metadata={"format": "pt"})
        # safetensors makes its files private; the other files follow the umask.
        weights.chmod((partial / "config.json").stat().st_mode)
        with fs.open_append(weights) as file:
            fs.sync(file)
        fs.sync_dir(partial)
        fs.replace(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    fs.sync_dir(out.parent)


@dataclass(frozen=True, kw_only=True)
class _Shape:
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rope_theta: float
    rms_norm_eps: float


class _Source:
    """One GGUF file; every lookup that fails names the file and the key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_file():
            raise TargetError(f"{path}: no such file.")
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise TargetError(f"{path}: not a GGUF file (it starts with {magic!r}).")
        try:
            self._reader = GGUFReader(path)
        except (ValueError, IndexError, UnicodeDecodeError) as error:
            raise TargetError(
                f"{path}: the GGUF header cannot be read ({error}). Fetch the file again."
            ) from error
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise TargetError(
                f"{path}: a GGUF of architecture {architecture!r}; only 'llama' can be converted. "
                "Use a Transformers folder of this target instead."
            )

    def field(self, key: str, default: Any = None) -> Any:
        """The value of a key, or `default`; absent without a default is an error."""
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise TargetError(f"{self._path}: the GGUF lacks the key {key!r}.")
        return default

    def shape(self) -> _Shape:
        """The sizes, from the metadata. Raises TargetError for what cannot be represented."""
        scaling = self.field("llama.rope.scaling.type", "none")
        experts = self.field("llama.expert_count", 0)
        factors = any(t.name == "rope_freqs.weight" for t in self._reader.tensors)
        if scaling != "none" or experts or factors:
            raise TargetError(
                f"{self._path}: rope scaling {scaling!r}, {experts} experts, rope factors "
                f"{'present' if factors else 'absent'}; only plain dense Llama can be converted. "
                "Use a Transformers folder of this target instead."
            )
        heads = self.field("llama.attention.head_count")
        hidden = self.field("llama.embedding_length")
        head_dim = self.field("llama.attention.key_length", hidden // heads)
        rotated = self.field("llama.rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise TargetError(
                f"{self._path}: rope turns {rotated} of {head_dim} head dimensions; partial "
                "rotation is not a Llama's."
            )
        tokens = self.field("tokenizer.ggml.tokens")
        return _Shape(
            num_layers=self.field("llama.block_count"),
            hidden_size=hidden,
            intermediate_size=self.field("llama.feed_forward_length"),
            num_heads=heads,
            num_kv_heads=self.field("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab_size=self.field("llama.vocab_size", len(tokens)),
            max_position=self.field("llama.context_length"),
            rope_theta=_shortest(self.field("llama.rope.freq_base", 10000.0)),
            rms_norm_eps=_shortest(self.field("llama.attention.layer_norm_rms_epsilon")),
        )

    def tensors(self, shape: _Shape) -> dict[str, np.ndarray]:
        """Every weight under its Transformers name, fp32 and contiguous."""
        heads = {"attn_q": shape.num_heads, "attn_k": shape.num_kv_heads}
        tensors: dict[str, np.ndarray] = {}
        for tensor in self._reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            match = _LAYER_TENSOR.fullmatch(tensor.name)
            if match and match[2] in _LAYER_NAMES:
                name = f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"
                if match[2] in heads:
                    values = _halves_from_pairs(values, heads[match[2]])
            elif tensor.name in _GLOBAL_NAMES:
                name = _GLOBAL_NAMES[tensor.name]
            else:
                raise TargetError(
                    f"{self._path}: tensor {tensor.name!r} has no place in a Llama. "
                    "Use a Transformers folder of this target instead."
                )
            tensors[name] = np.ascontiguousarray(values)
        expected = shape.num_layers * len(_LAYER_NAMES) + 2
        found = len(tensors) - ("lm_head.weight" in tensors)
        if found != expected:
            raise TargetError(
                f"{self._path}: {found} tensors where {shape.num_layers} layers need {expected}. "
                "The file is incomplete: fetch it again."
            )
        return tensors

    def vocabulary(self) -> GGUFVocabulary:
        """The tokenizer's parts. Raises TargetError for another kind than byte-level BPE."""
        model = self.field("tokenizer.ggml.model")
        if model != "gpt2":
            raise TargetError(
                f"{self._path}: tokenizer {model!r}; only byte-level BPE ('gpt2') can be converted."
            )
        ids = {
            role: self.field(f"tokenizer.ggml.{key}_token_id", -1)
            for role, key in {
                "bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown",
            }.items()
        }  # fmt: skip
        return GGUFVocabulary(
            path=self._path,
            tokens=self.field("tokenizer.ggml.tokens"),
            token_types=self.field("tokenizer.ggml.token_type"),
            merges=self.field("tokenizer.ggml.merges"),
            pre_tokenizer=self.field("tokenizer.ggml.pre", "default"),
            special_ids={role: i for role, i in ids.items() if i >= 0},
            chat_template=self.field("tokenizer.chat_template", ""),
        )


def _halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q and k.

    Its rope turns neighbouring rows (2i, 2i + 1) of a head; Transformers' turns row i with row
    i + d/2.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, columns)


def _shortest(value: float) -> float:
    """The shortest decimal of a float that GGUF keeps in 32 bits: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value)))


def _config(shape: _Shape, vocabulary: GGUFVocabulary, name: str, tied: bool) -> dict[str, Any]:
    return {
        "_name_or_path": name,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        **vocabulary.token_ids("bos", "eos", "pad"),
    }


def _json(value: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
