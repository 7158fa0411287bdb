"""What a target is: sizes, kinds and identity, read from its folder without loading it."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.durable.checksum import Around
from paceline.durable.errors import TargetError
from paceline.target.families import LayerKind, NormKind
from paceline.target.folder import ModelFolder


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """The frozen LLM as its files describe it."""

    name: str
    """`_name_or_path` of config.json, or the folder's name."""
    architecture: str
    """First of `architectures`, such as `LlamaForCausalLM`."""
    model_type: str
    """Key of the family, such as `llama`."""
    identity: str
    """32 hex digits over weights and config; equal means interchangeable. Empty where nobody asked
    for it."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Explicit where the config says so; not always hidden size over heads."""
    vocab_size: int
    """Rows of embedding and lm_head, padding rows included."""
    tokenizer_size: int
    """Highest token id plus one; `vocab_size` where the folder has no tokenizer.json."""
    rms_norm_eps: float
    norm: NormKind
    rope: dict[str, Any]
    """Transformers' `rope_parameters`, with `rope_type` and `rope_theta` always there."""
    max_position: int
    """Longest context in tokens."""
    tie_word_embeddings: bool
    layer_kinds: tuple[LayerKind, ...]
    sliding_window: int | None
    """Tokens that sliding layers see; None where no layer slides."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer: of generation_config.json, else of config.json."""
    bos_token_id: int | None
    pad_token_id: int | None


def read_spec(path: Path, *, identify: bool = True, around: Around = nullcontext) -> TargetSpec:
    """Read a Transformers folder's JSON files, and its weights once for the identity.

    Without `identify` no weight is read, nor need any be there; `around` is entered for each read
    of them. Imports neither torch nor
    Transformers. Raises TargetError for a folder that is incomplete or of an unsupported family.
    """
    folder = ModelFolder(path)
    family = folder.family
    heads = folder.get("num_attention_heads")
    hidden = folder.get("hidden_size")
    num_layers = folder.get("num_hidden_layers")
    vocab_size = folder.get("vocab_size")
    try:
        kinds = family.layer_kinds(folder.config)
    except ValueError as error:
        raise TargetError(f"{path / 'config.json'}: layer_types: {error}.") from error
    if len(kinds) != num_layers:
        raise TargetError(
            f"{path / 'config.json'}: layer_types names {len(kinds)} layers, num_hidden_layers "
            f"{num_layers}."
        )
    size = folder.tokenizer_size()
    if size is not None and size > vocab_size:
        raise TargetError(
            f"{path}: tokenizer.json has ids up to {size - 1}, the embedding {vocab_size} rows. "
            "Tokenizer and weights do not belong together."
        )
    eos = folder.generation().get("eos_token_id", folder.get("eos_token_id", None))
    return TargetSpec(
        name=folder.outer.get("_name_or_path") or path.resolve().name,
        architecture=(folder.outer.get("architectures") or [""])[0],
        model_type=folder.model_type,
        identity=folder.identity(around=around) if identify else "",
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=folder.get("intermediate_size"),
        num_heads=heads,
        num_kv_heads=folder.get("num_key_value_heads", heads),
        head_dim=folder.get("head_dim", family.head_dim or hidden // heads),
        vocab_size=vocab_size,
        tokenizer_size=vocab_size if size is None else size,
        rms_norm_eps=folder.get("rms_norm_eps", 1e-6),
        norm=family.norm,
        rope=_rope(folder),
        max_position=folder.get("max_position_embeddings"),
        tie_word_embeddings=folder.get("tie_word_embeddings", family.tie_word_embeddings),
        layer_kinds=kinds,
        sliding_window=family.sliding_window(folder.config) if LayerKind.SLIDING in kinds else None,
        eos_token_ids=_ids(eos),
        bos_token_id=folder.get("bos_token_id", None),
        pad_token_id=folder.get("pad_token_id", None),
    )


def _rope(folder: ModelFolder) -> dict[str, Any]:
    """`rope_parameters` as Transformers 5 completes them, from its keys or the older ones."""
    family = folder.family
    rope = dict(folder.get("rope_scaling", None) or folder.get("rope_parameters", None) or {})
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = folder.get("rope_theta", family.rope_theta)
    partial = folder.get("partial_rotary_factor", family.partial_rotary_factor)
    if partial is not None:
        rope.setdefault("partial_rotary_factor", partial)
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        original = folder.get(
            "original_max_position_embeddings",
            rope.get("original_max_position_embeddings", folder.get("max_position_embeddings")),
        )
        rope["original_max_position_embeddings"] = original
    return rope


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
