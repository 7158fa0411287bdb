"""Sizes of target and drafter, from configs and file headers: no weight is read."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.doctor.safetensors_header import read_header
from paceline.drafter.shape import DrafterShape
from paceline.durable.errors import TargetError, UserError
from paceline.recipe.schema import DrafterRecipe
from paceline.target.folder import ModelFolder
from paceline.target.spec import TargetSpec, read_spec

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_NOT_LOADED = re.compile(r"(^|\.)(visual|vision_tower|vision_model|multi_modal_projector|mtp)\.")
"""Parts of a checkpoint that a causal language model leaves out."""

_LM_HEAD = re.compile(r"(^|\.)lm_head\.weight$")


@dataclass(frozen=True, kw_only=True)
class TargetSizes:
    """What the target's files say of its size."""

    spec: TargetSpec
    """Without its identity, for which every weight would have to be read."""
    weights: int | None
    """Numbers that are loaded; None where the weights are not there."""
    layer_weights: tuple[int, ...]
    """Numbers of each layer that a token is multiplied with: of experts, those that it visits.
    Empty where the weights are not there."""
    file_bytes: int | None
    """Of the weight files; None where they are not there."""
    unknown: str = ""
    """Why the weights are not known; empty where they are."""


def read_target(path: Path) -> TargetSizes:
    """Read config.json and the headers of the weights.

    Raises TargetError for a folder without a usable config, and for a weight file whose header
    cannot be read. Weights that are not there yet are no error: a plan may come before them.
    """
    spec = read_spec(path, identify=False)
    folder = ModelFolder(path)
    try:
        files = sorted(set(folder.weights().values()))
    except TargetError as error:
        return TargetSizes(
            spec=spec, weights=None, layer_weights=(), file_bytes=None, unknown=str(error)
        )
    weights = 0
    layers = [0.0] * spec.num_layers
    share = _visited_share(folder)
    for file in files:
        for name, shape in read_header(file).shapes.items():
            numbers = math.prod(shape)
            if _NOT_LOADED.search(name) or (spec.tie_word_embeddings and _LM_HEAD.search(name)):
                continue
            weights += numbers
            layer = _LAYER.search(name)
            if layer is not None and int(layer[1]) < len(layers):
                layers[int(layer[1])] += numbers * (share if ".experts." in name else 1.0)
    return TargetSizes(
        spec=spec,
        weights=weights,
        layer_weights=tuple(map(round, layers)),
        file_bytes=sum(file.stat().st_size for file in files),
    )


def _visited_share(folder: ModelFolder) -> float:
    """The share of the experts that a token passes through; 1 without experts."""
    experts = folder.get("num_experts", 0)
    return folder.get("num_experts_per_tok", experts) / experts if experts else 1.0


def drafter_shape(recipe: DrafterRecipe, spec: TargetSpec, num_taps: int) -> DrafterShape:
    """The drafter that a recipe makes beside a target, or that it starts from.

    Raises UserError where the drafter to start from has no readable config.
    """
    layers, draft_vocab, block = recipe.layers, recipe.draft_vocab, recipe.block_size
    if recipe.warm_start is not None:
        path = Path(recipe.warm_start) / "config.json"
        try:
            config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            layers, block = int(config["num_layers"]), int(config["block_size"])
            draft_vocab = config["draft_vocab_size"]
        except (OSError, LookupError, TypeError, ValueError, msgspec.MsgspecError) as error:
            raise UserError(f"{path}: not a drafter's config ({error}).") from error
    return DrafterShape(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_taps=num_taps,
        vocab_size=spec.vocab_size,
        draft_vocab_size=draft_vocab,
        block_size=block,
    )
