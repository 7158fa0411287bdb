"""A new drafter for a target: its config, its mask token, its first weights."""

from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.drafter.config import DrafterConfig
from paceline.drafter.dflash import DFlash, DFlashAttention
from paceline.drafter.vocabulary import DraftVocabulary
from paceline.durable.errors import RecipeError
from paceline.recipe.schema import DrafterRecipe
from paceline.target.families import LayerKind, NormKind
from paceline.target.fit import mask_problem
from paceline.target.spec import TargetSpec
from paceline.target.weights import TensorReader

_MIXING_STD = 0.002
"""Noise on the taps that the first projection does not copy, so that they get a gradient."""

_ROPE_KEYS_OF_OTHERS = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Turned features of a hybrid target's own attention; the drafter turns whole heads."""


def drafter_config(
    recipe: DrafterRecipe,
    spec: TargetSpec,
    taps: tuple[int, ...],
    *,
    mask_token_id: int,
    template_digest: str,
    template_args: dict[str, Any],
) -> DrafterConfig:
    """The config of a drafter of the target's own width, heads and rope."""
    return DrafterConfig(
        algorithm=recipe.algorithm,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=recipe.layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope={k: v for k, v in spec.rope.items() if k not in _ROPE_KEYS_OF_OTHERS},
        max_position=spec.max_position,
        vocab_size=spec.vocab_size,
        draft_vocab_size=recipe.draft_vocab,
        block_size=recipe.block_size,
        mask_token_id=mask_token_id,
        taps=taps,
        in_block_mask=recipe.in_block_mask,
        layer_types=recipe.layer_types or (),
        sliding_window=recipe.sliding_window,
        sliding_in_block_mask=recipe.sliding_in_block_mask,
        target_name=spec.name,
        target_identity=spec.identity,
        target_num_layers=spec.num_layers,
        template_digest=template_digest,
        template_args=template_args,
    )


def choose_mask_token(
    asked: int | None, spec: TargetSpec, *, special_ids: Iterable[int], used: Container[int]
) -> int:
    """An embedding row for masked slots: never pad, end or beginning, never one that occurs.

    Preferred are rows behind the tokenizer's last token, then unused special tokens, then the
    highest unused id.

    Args:
        asked: the recipe's own choice, checked against the same rule.
        spec: the target.
        special_ids: the tokenizer's special tokens.
        used: token ids that occur in the corpus.

    Raises:
        RecipeError: the asked id breaks the rule, or no row is free.

    """
    if asked is not None:
        if not is_mask_token(asked, spec, used):
            raise RecipeError(
                f"drafter.mask_token_id: {asked} is a pad, begin or end token, occurs in the "
                "corpus, or is no row of the embedding. Leave the key out to have one chosen."
            )
        return asked
    candidates = (
        *range(spec.tokenizer_size, spec.vocab_size),
        *sorted(special_ids, reverse=True),
        *range(spec.vocab_size - 1, -1, -1),
    )
    chosen = next((token for token in candidates if is_mask_token(token, spec, used)), None)
    if chosen is None:
        raise RecipeError("drafter.mask_token_id: every row of the target's embedding is in use.")
    return chosen


def is_mask_token(token: int, spec: TargetSpec, used: Container[int]) -> bool:
    """Whether masked slots may have this embedding row, the corpus having the ids in `used`."""
    return not mask_problem(token, spec) and token not in used


def new_drafter(
    config: DrafterConfig,
    recipe: DrafterRecipe,
    spec: TargetSpec,
    path: Path,
    *,
    seed: int,
    vocabulary: DraftVocabulary | None = None,
) -> DFlash:
    """A drafter with fp32 weights: noise, or copies of the target's last layers.

    A copy starts from a working reader of the target's residual stream: the context projection
    passes on the deepest tap, and the layers' keys and values of it are nearly the target's own
    (docs/algorithms.md, "Start from the target"). `vocabulary` is the reduced one of a config
    that has one.
    """
    if (vocabulary is None) != (config.draft_vocab_size is None):
        raise ValueError("a vocabulary is needed where the config has one, and only there")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = DFlash(config, vocabulary)
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        if recipe.init == "target":
            _copy_last_layers(drafter, spec, TensorReader(path))
    return drafter


def _copy_last_layers(drafter: DFlash, spec: TargetSpec, reader: TensorReader) -> None:
    attending = [i for i, kind in enumerate(spec.layer_kinds) if kind is not LayerKind.LINEAR]
    sources = attending[-drafter.config.num_layers :]
    shift = 1.0 if spec.norm is NormKind.ONE_PLUS_WEIGHT else 0.0
    with torch.no_grad():
        input_norms = []
        for layer, source in zip(drafter.blocks, sources, strict=False):
            tensors = reader.layer(source)
            for name, parameter in layer.named_parameters():
                value = tensors.get(name)
                if value is not None and value.shape == parameter.shape:
                    parameter.copy_(value + shift if "norm" in name else value)
            input_norms.append(tensors["input_layernorm.weight"] + shift)
            for kind in ("q", "k"):
                if f"self_attn.{kind}_norm.weight" not in tensors:
                    _match_scale(layer.self_attn, kind, layer.input_layernorm.weight)
        drafter.norm.weight.copy_(reader.final_norm() + shift)
        if input_norms:
            drafter.hidden_norm.weight.copy_(torch.stack(input_norms).mean(0))
        hidden = drafter.config.hidden_size
        nn.init.normal_(drafter.fc.weight, std=_MIXING_STD)
        drafter.fc.weight[:, -hidden:].copy_(torch.eye(hidden))


def _match_scale(attention: DFlashAttention, kind: str, norm: torch.Tensor) -> None:
    """Give a head norm that the target lacks the size its queries or keys have anyway.

    For inputs of unit size the root mean square of a projection is that of its rows' norms.
    """
    projection: torch.Tensor = getattr(attention, f"{kind}_proj").weight
    size = (projection * norm).pow(2).sum(dim=1).mean().sqrt()
    getattr(attention, f"{kind}_norm").weight.fill_(float(size))
