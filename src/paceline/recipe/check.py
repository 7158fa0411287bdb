"""Judges what a recipe says: each value by itself, then the combinations. Loads nothing."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.durable.errors import RecipeError
from paceline.recipe.bounds import BOUNDS
from paceline.recipe.convert import closest
from paceline.recipe.corpus_inputs import corpus_problems
from paceline.recipe.data_files import data_name, data_path, path_problem
from paceline.recipe.drafter_inputs import drafter_input_problems, warm_start_problem
from paceline.recipe.extract_inputs import extract_problems
from paceline.recipe.fingerprint import flatten
from paceline.recipe.objective_inputs import objective_notes, objective_problems
from paceline.recipe.online import online_notes, online_problems
from paceline.recipe.schema import Recipe, TrainRecipe
from paceline.recipe.score_inputs import score_notes, score_problems
from paceline.recipe.served_inputs import served_problems
from paceline.recipe.tracker_inputs import secret_problems, tracker_problems

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def check_recipe(recipe: Recipe) -> None:
    """Raise RecipeError that lists everything impossible in the recipe, a line each.

    Touches no file: `check_paths` does that.
    """
    _raise_all(
        [
            *_out_of_bounds(recipe),
            *_names(recipe),
            *_devices(recipe),
            *_lists(recipe),
            *_lengths(recipe),
            *_schedule(recipe),
            *_template_args(recipe),
            *_sources(recipe),
            *corpus_problems(recipe),
            *drafter_input_problems(recipe.drafter),
            *extract_problems(recipe),
            *objective_problems(recipe),
            *online_problems(recipe),
            *score_problems(recipe),
            *served_problems(recipe.regenerate),
            *tracker_problems(recipe.train),
            *secret_problems(recipe),
        ]
    )


def check_paths(recipe: Recipe, *, sources: bool = True, drafter: bool = True) -> None:
    """Raise RecipeError that lists each path of the recipe with nothing, or the wrong thing, there.

    Looks at names only; `sources` false leaves the data sets out, `drafter` false what the drafter
    is made from.
    """
    problems: list[str] = []
    template = recipe.corpus.template_file
    if template is not None and not Path(template).is_file():
        problems.append(
            f"corpus.template_file: {template}: no such file.{_neighbour(Path(template))}"
        )
    target = Path(recipe.target.path)
    if not target.is_dir():
        kind = "a file, not a model folder" if target.is_file() else "no such folder"
        problems.append(f"target.path: {target}: {kind}.{_neighbour(target)}")
    elif not (target / "config.json").is_file():
        problems.append(
            f"target.path: {target} holds no config.json. Name the folder of a Transformers model."
        )
    for key, given in (
        ("corpus.sources", recipe.corpus.sources if sources else ()),
        ("score.datasets", recipe.score.datasets),
    ):
        for number, path in enumerate(source.path for source in given):
            problem = path_problem(path) if path else None
            if problem is not None:
                place = data_path(path)
                near = _neighbour(place) if place is not None and not place.exists() else ""
                problems.append(f"{key}.{number}.path: {path}: {problem}.{near}")
    if drafter:
        problems += _drafter_paths(recipe)
    _raise_all(problems)


def _drafter_paths(recipe: Recipe) -> Iterator[str]:
    for number, text in enumerate(recipe.drafter.vocab_text):
        path = Path(text)
        if not path.is_file():
            kind = "a folder; name a file in it" if path.is_dir() else "no such file"
            yield f"drafter.vocab_text.{number}: {path}: {kind}.{_neighbour(path)}"
    if recipe.drafter.warm_start is not None:
        folder = Path(recipe.drafter.warm_start)
        problem = warm_start_problem(folder)
        if problem is not None:
            near = "" if folder.exists() else _neighbour(folder)
            yield f"drafter.warm_start: {folder}: {problem}.{near}"


def notes(recipe: Recipe) -> list[str]:
    """What is possible and may still surprise; sentences for the terminal."""
    found: list[str] = []
    if not (recipe.score.datasets or any(s.split == "heldout" for s in recipe.corpus.sources)):
        found.append(
            "corpus.sources: none has `split: heldout`, so the score is measured on the "
            "validation prompts, which also chose the checkpoint."
        )
    if not recipe.regenerate.enabled:
        found.append(
            "regenerate.enabled is false: the drafter learns the data's answers; acceptance is "
            "lower where they are not the target's own."
        )
    block, gamma = recipe.drafter.block_size, recipe.train.gamma
    if gamma > 0.75 * block:
        found.append(
            f"train.gamma: {gamma:g} hardly tells the slots of a block of {block} apart; about "
            f"half the block size is usual ({block / 2:g})."
        )
    if recipe.train.schedule == "constant" and recipe.train.min_learning_rate_ratio:
        found.append("train.min_learning_rate_ratio has no effect with schedule constant.")
    if recipe.regenerate.temperature == 0 and recipe.regenerate.top_p < 1:
        found.append("regenerate.top_p has no effect at temperature 0.")
    found += objective_notes(recipe)
    found += score_notes(recipe)
    found += online_notes(recipe)
    return found


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise RecipeError("\n".join(problems))


def _out_of_bounds(recipe: Recipe) -> Iterator[str]:
    bounds = dict(BOUNDS)
    for key, value in flatten(recipe).items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        bound = bounds.get(re.sub(r"\.\d+(?=\.|$)", ".*", key))
        if bound is not None and not bound.holds(value):
            yield f"{key}: {value} is impossible. Give a number {bound.in_words()}."


def _names(recipe: Recipe) -> Iterator[str]:
    if not _NAME.fullmatch(recipe.name):
        yield (
            f'name: "{recipe.name}" cannot name a folder. Use letters, digits, `.`, `_` and `-`, '
            "not starting with `.` or `-`."
        )
    if not recipe.target.path:
        yield "target.path: empty. Give the folder of a Transformers model."


def _devices(recipe: Recipe) -> Iterator[str]:
    for key, device in (
        ("target.device", recipe.target.device),
        ("train.device", recipe.train.device),
    ):
        if not _DEVICE.fullmatch(device):
            yield f'{key}: "{device}" is no device. Give cpu, or cuda:0 (the number of the GPU).'
    if recipe.target.dtype == "float16" and recipe.target.device == "cpu":
        yield "target.dtype: float16 does not run on a CPU. Use float32 or bfloat16."


def _lists(recipe: Recipe) -> Iterator[str]:
    taps = recipe.extract.taps
    if taps is not None and (not taps or list(taps) != sorted(set(taps))):
        yield (
            f"extract.taps: {list(taps)} must be layer ids in rising order, each once, at least "
            "one; or null to have num_taps of them chosen."
        )
    types, layers = recipe.drafter.layer_types, recipe.drafter.layers
    if types is not None and len(types) != layers:
        yield (
            f"drafter.layer_types: {len(types)} types for {layers} layers (drafter.layers). Give "
            "one for each layer, or null."
        )
    for key in ("budgets", "walk_budgets"):
        budgets: tuple[int, ...] = getattr(recipe.score, key)
        doubled = sorted(b for b, times in Counter(budgets).items() if times > 1)
        if doubled:
            yield f"score.{key}: {doubled} stand there more than once. Give each budget once."


def _lengths(recipe: Recipe) -> Iterator[str]:
    longest, block = recipe.corpus.max_length, recipe.drafter.block_size
    if block > longest:
        yield (
            f"drafter.block_size: {block} does not fit into samples of corpus.max_length "
            f"{longest} tokens. Lower block_size (16 is usual) or raise max_length."
        )
    if recipe.corpus.min_loss_tokens >= longest:
        yield (
            f"corpus.min_loss_tokens: {recipe.corpus.min_loss_tokens} leaves no room for a prompt "
            f"in corpus.max_length {longest}, so every sample would be quarantined. Lower it."
        )
    if recipe.regenerate.enabled and recipe.regenerate.max_new_tokens >= longest:
        yield (
            f"regenerate.max_new_tokens: {recipe.regenerate.max_new_tokens} leaves no room for a "
            f"prompt in corpus.max_length {longest}. Lower it or raise max_length."
        )
    if recipe.extract.chunk_tokens is None and recipe.extract.batch_tokens < longest:
        yield (
            f"extract.batch_tokens: {recipe.extract.batch_tokens} cannot hold a sample of "
            f"corpus.max_length {longest} tokens. Raise it to {longest}, lower max_length, or "
            "have long samples taken in pieces (extract.chunk_tokens)."
        )


def _schedule(recipe: Recipe) -> Iterator[str]:
    train, bounds = recipe.train, dict(BOUNDS)
    if train.warmup_steps is not None:
        if train.warmup_ratio != TrainRecipe().warmup_ratio:
            yield (
                f"train.warmup_steps: {train.warmup_steps}, and train.warmup_ratio "
                f"{train.warmup_ratio} says the same in other words. Leave out one of them."
            )
        return  # Whether they fit into the run, only the number of samples tells.
    for key in ("warmup_ratio", "decay_ratio"):
        if not bounds[f"train.{key}"].holds(getattr(train, key)):
            return  # Said already, and their sum says nothing more.
    # Sums of decimal fractions are off by a last digit.
    if train.schedule == "wsd" and train.warmup_ratio + train.decay_ratio > 1 + 1e-9:
        yield (
            f"train.decay_ratio: {train.decay_ratio} and train.warmup_ratio {train.warmup_ratio} "
            "are more than the whole run. Lower one of them."
        )


def _template_args(recipe: Recipe) -> Iterator[str]:
    for key, value in recipe.corpus.template_args.items():
        if not _is_json(value):
            yield (
                f"corpus.template_args.{key}: {value!r} cannot be recorded as JSON. Use text, "
                "numbers, true, false, null, lists and mappings with text as names."
            )


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_json(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_json, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))


def _sources(recipe: Recipe) -> Iterator[str]:
    sources = recipe.corpus.sources
    splits = {s.split for s in sources}
    if "train" not in splits:
        yield (
            "corpus.sources: none has `split: train`, so there is nothing to train on. Add "
            "`- path: FILE.jsonl`."
        )
    elif (
        "heldout" not in splits
        and recipe.corpus.validation_fraction == 0
        and not recipe.score.datasets
    ):
        yield (
            "corpus.validation_fraction: 0 without a `split: heldout` source leaves no prompts to "
            "measure on. Use 0.05, or add a held-out source."
        )
    for number, source in enumerate(sources):
        if not source.path:
            yield f"corpus.sources.{number}.path: empty. Give a file, a folder, or hf:OWNER/NAME."
    names = Counter(s.name or data_name(s.path) for s in sources if s.name or s.path)
    for name, times in names.items():
        if times > 1:
            yield (
                f'corpus.sources: {times} of them are named "{name}", so reports could not tell '
                "them apart. Give each its own `name`."
            )
    trained = {s.path for s in sources if s.split == "train" and s.path}
    for number, source in enumerate(sources):
        if source.split == "heldout" and source.path in trained:
            yield (
                f"corpus.sources.{number}.path: {source.path} is also trained on, so a score on it "
                "would not be held out. Use another file."
            )


def _neighbour(path: Path) -> str:
    try:
        names = [p.name for p in path.parent.iterdir()]
    except OSError:
        return f" {path.parent} is no readable folder either." if str(path.parent) else ""
    near = closest(path.name, names)
    return f" Did you mean {path.parent / near}?" if near and near != path.name else ""
