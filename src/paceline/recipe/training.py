"""What of a recipe determines a training, and what of that may change while it stands half-way."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.durable.errors import RecipeError
from paceline.recipe.convert import closest, known_keys
from paceline.recipe.online import is_on_cpu, training_devices
from paceline.recipe.schema import TrainRecipe

WITHOUT_EFFECT = (
    "train.device",
    "train.threads",
    "train.keep_checkpoints",
    "train.keep_every",
    "train.cache_bytes",
    "train.trackers",
    "train.tracker_project",
    "train.tracker_options",
    "train.target_devices",
    "train.tee",
    "train.drafter_devices",
    "train.queue_bytes",
)
"""Keys that change where and how fast, not what is computed."""

CHANGEABLE = (
    "train.epochs",
    "train.anchors",
    "train.gamma",
    "train.objective",
    "train.batch_samples",
    "train.micro_batch_tokens",
    "train.noise",
    "train.noise_start",
    "train.noise_end",
    "train.muon_learning_rate_ratio",
    "train.muon_momentum",
    "train.learning_rate",
    "train.schedule",
    "train.decay_ratio",
    "train.min_learning_rate_ratio",
    "train.warmup_ratio",
    "train.warmup_steps",
    "train.betas",
    "train.eps",
    "train.weight_decay",
    "train.grad_clip",
    "train.loss_chunk",
    "train.compute",
    "train.evaluations",
    "train.eval_samples",
    "train.eval_anchors",
    "train.max_bad_steps",
    "train.sync",
    "train.sync_every",
    "train.outer_learning_rate",
    "train.outer_momentum",
)
"""Keys with which a training can go on from a checkpoint that was made with another value."""

LATER_KEYS = {
    "train.shard_window": None,
    "train.objective": (),
    "train.noise": "none",
    "train.noise_start": 0.05,
    "train.noise_end": 0.01,
    "train.optimizer": "adamw",
    "train.muon_learning_rate_ratio": 10.0,
    "train.muon_momentum": 0.95,
    "train.warmup_steps": None,
    "train.online": False,
    "train.sync": "average",
    "train.sync_every": 50,
    "train.outer_learning_rate": 1.0,
    "train.outer_momentum": 0.0,
}
"""Keys that records of earlier releases lack, with what they did then. A record holds such a key
only where it says something else, so that those trainings can go on."""

_ORDER = "it determines the order of the samples, and a place in one order is none in another"

_REASONS = {
    "train.seed": _ORDER,
    "train.shard_window": _ORDER,
    "train.online": "it determines where the samples come from, and with that their order",
    "train.optimizer": "the checkpoint holds the state of the other optimizer",
    "drafter": "it determines the network, and the checkpoint's weights are those of another",
    "target": "it determines the data, and the checkpoint stands in the middle of other data",
    "corpus": "it determines the data, and the checkpoint stands in the middle of other data",
    "regenerate": "it determines the data, and the checkpoint stands in the middle of other data",
    "extract": "it determines the data, and the checkpoint stands in the middle of other data",
}


def resolved_compute(recipe: TrainRecipe) -> str:
    """`float32` or `bfloat16`: what `auto` stands for on the device of the first drafter."""
    if recipe.compute != "auto":
        return recipe.compute
    return "float32" if is_on_cpu(training_devices(recipe)[0]) else "bfloat16"


def training_fields(recipe: TrainRecipe) -> dict[str, Any]:
    """The section's values that determine what is computed, `auto` resolved."""
    fields = {k: v for k, v in asdict(recipe).items() if f"train.{k}" not in WITHOUT_EFFECT}
    same = [k for k, v in LATER_KEYS.items() if fields[k.removeprefix("train.")] == v]
    fields = {k: v for k, v in fields.items() if f"train.{k}" not in same}
    return fields | {"compute": resolved_compute(recipe)}


def require_changeable(keys: Sequence[str]) -> None:
    """Raise RecipeError, a line for each of `keys` that `--allow-change` cannot take and why."""
    problems = [f"--allow-change {key}: {_refusal(key)}" for key in keys if key not in CHANGEABLE]
    if problems:
        raise RecipeError("\n".join(problems))


def _refusal(key: str) -> str:
    whole = next((k for k in CHANGEABLE if key.startswith(f"{k}.")), None)
    if whole:
        return f"a part of {whole}, which changes as a whole: name that."
    known = known_keys()
    if key not in known and not key.startswith(("corpus.sources.", "corpus.template_args.")):
        last = {k.rpartition(".")[2]: k for k in CHANGEABLE}
        near = closest(key, known) or last.get(closest(key, list(last)) or "")
        return f"no such key.{f' Did you mean {near}?' if near else ''}"
    if key in WITHOUT_EFFECT:
        return "it changes no result: set it, no permission is needed."
    section = key.partition(".")[0]
    reason = _REASONS.get(key) or _REASONS.get(section)
    if reason:
        return f"{reason}. Use a new run directory (`--run DIR`)."
    if key == "train":
        return "a section. Name each of its keys, such as train.learning_rate."
    return "the training does not depend on it."
