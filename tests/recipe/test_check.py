import math
import re
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.durable.errors import RecipeError
from paceline.recipe.bounds import BOUNDS
from paceline.recipe.check import check_paths, check_recipe, notes
from paceline.recipe.convert import convert_recipe
from paceline.recipe.schema import Recipe

VALID: dict[str, Any] = {
    "target": {"path": "/m"},
    "corpus": {
        "sources": [{"path": "/a.jsonl"}, {"path": "/b.jsonl", "split": "heldout"}],
    },
}


def recipe_with(**changes: Any) -> Recipe:
    """The valid recipe with dotted keys (`train__epochs`) changed."""
    tree = {section: dict(keys) for section, keys in VALID.items()}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            tree.setdefault(section, {})[name] = value
        else:
            tree[section] = value
    recipe, problems = convert_recipe(tree)
    assert recipe is not None, problems
    return recipe


def complaints(recipe: Recipe) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        check_recipe(recipe)
    return str(caught.value).splitlines()


def test_defaults_with_a_target_and_data_are_possible():
    check_recipe(recipe_with())


@pytest.mark.parametrize(
    "shares",
    [
        {"schedule": "wsd", "warmup_ratio": 0.7, "decay_ratio": 0.3},
        {"schedule": "wsd", "warmup_ratio": 0.9, "decay_ratio": 0.1},
        {"schedule": "cosine", "warmup_ratio": 0.9, "decay_ratio": 0.2},
        {"schedule": "wsd", "warmup_steps": 500, "decay_ratio": 0.99},
        {"warmup_steps": 0, "warmup_ratio": 0.04},
    ],
)
def test_shares_that_fill_the_run_or_do_not_count_are_possible(shares):
    check_recipe(recipe_with(train=shares))


def test_a_share_out_of_bounds_is_one_problem_only():
    """That the shares are then more than the run only follows from it."""
    for share in ({"decay_ratio": 1.5}, {"decay_ratio": 0.9, "warmup_ratio": 1.5}):
        with pytest.raises(RecipeError) as found:
            check_recipe(recipe_with(train={"schedule": "wsd", **share}))
        (problem,) = str(found.value).splitlines()
        assert "1.5 is impossible" in problem


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"drafter__block_size": 1},
            "drafter.block_size: 1 is impossible. Give a number at least 2",
        ),
        (
            {"train__schedule": "wsd", "train__warmup_ratio": 0.5, "train__decay_ratio": 0.6},
            "train.decay_ratio: 0.6 and train.warmup_ratio 0.5 are more than the whole run",
        ),
        ({"drafter__block_size": 4096}, "drafter.block_size: 4096 does not fit into samples of"),
        ({"regenerate__max_new_tokens": 0}, "regenerate.max_new_tokens: 0 is impossible"),
        ({"regenerate__max_new_tokens": 2048}, "leaves no room for a prompt in corpus.max_length"),
        ({"regenerate__top_p": 0.0}, "regenerate.top_p: 0.0 is impossible. Give a number above 0"),
        ({"regenerate__top_p": 1.1}, "above 0 and at most 1"),
        ({"regenerate__temperature": -0.1}, "regenerate.temperature: -0.1 is impossible"),
        ({"regenerate__temperature": math.nan}, "regenerate.temperature: nan is impossible"),
        ({"regenerate__loop_repeats": 1}, "regenerate.loop_repeats: 1 is impossible"),
        ({"corpus__validation_fraction": 1.0}, "at least 0 and below 1"),
        ({"corpus__validation_fraction": -0.1}, "corpus.validation_fraction: -0.1"),
        ({"corpus__min_loss_tokens": 0}, "corpus.min_loss_tokens: 0"),
        ({"corpus__min_loss_tokens": 2048}, "every sample would be quarantined"),
        ({"train__anchors": 0}, "train.anchors: 0"),
        ({"train__warmup_ratio": 1.0}, "train.warmup_ratio: 1.0"),
        ({"train__warmup_steps": -1}, "train.warmup_steps: -1"),
        (
            {"train__warmup_steps": 50, "train__warmup_ratio": 0.1},
            "train.warmup_steps: 50, and train.warmup_ratio 0.1 says the same in other words",
        ),
        ({"train__noise_start": -0.1}, "train.noise_start: -0.1"),
        ({"train__noise_end": 1e39}, "train.noise_end: 1e+39"),
        ({"train__noise_end": math.inf}, "train.noise_end: inf"),
        ({"train__muon_momentum": 1.0}, "train.muon_momentum: 1.0"),
        ({"train__muon_learning_rate_ratio": 0}, "train.muon_learning_rate_ratio: 0.0"),
        ({"train__loss_chunk": 0}, "train.loss_chunk: 0"),
        ({"train__betas": [0.9, 1.0]}, "train.betas.1: 1.0"),
        ({"train__epochs": 0}, "train.epochs: 0.0 is impossible. Give a number above 0."),
        ({"train__epochs": math.inf}, "train.epochs: inf"),
        ({"train__keep_checkpoints": 0}, "train.keep_checkpoints: 0"),
        ({"train__keep_every": 0}, "train.keep_every: 0"),
        ({"train__evaluations": 0}, "train.evaluations: 0"),
        ({"train__gamma": 0}, "train.gamma: 0.0"),
        ({"train__objective": [{"kind": "tv", "weight": -1}]}, "train.objective.0.weight: -1.0"),
        (
            {"train__objective": [{"kind": "tree", "end_weight": 0.5, "ramp": [0.5, 1.5]}]},
            "train.objective.0.ramp.1: 1.5",
        ),
        (
            {"train__objective": [{"kind": "tree", "end_weight": 0.5, "ramp": [0.6, 0.5]}]},
            "train.objective.0.ramp: [0.6, 0.5] falls",
        ),
        ({"train__objective": [{"kind": "cross_entropy", "gamma": 0}]}, "objective.0.gamma: 0.0"),
        (
            {"train__objective": [{"kind": "cross_entropy"}, {"kind": "kl"}]},
            "train.objective.1.kind: kl reads the target's distribution, which is made of `last`.",
        ),
        (
            {"train__objective": [{"kind": "cross_entropy", "temperature": 2}]},
            "train.objective.0.temperature: 2.0 has no effect on cross_entropy with decay",
        ),
        (
            {"train__objective": [{"kind": "tree", "positions": "streak"}]},
            "train.objective.0.positions: streak has no effect on tree.",
        ),
        (
            {"train__objective": [{"kind": "cross_entropy", "ramp": [0.0, 0.5]}]},
            "train.objective.0.ramp: [0.0, 0.5] has no effect",
        ),
        (
            {"train__objective": [{"kind": "cross_entropy", "weight": 0}]},
            "train.objective: no term has a weight above 0",
        ),
        (
            {
                "train__objective": [
                    {"kind": "cross_entropy", "weight": 0, "end_weight": 1, "ramp": [1, 1]}
                ]
            },
            "train.objective: no term has a weight above 0",
        ),
        ({"train__learning_rate": 0}, "train.learning_rate: 0.0"),
        ({"train__threads": 0}, "train.threads: 0"),
        ({"train__seed": -1}, "train.seed: -1"),
        ({"train__device": "gpu"}, 'train.device: "gpu" is no device'),
        ({"target__path": "/m", "target__workers": 0}, "target.workers: 0"),
        ({"target__threads": 0}, "target.threads: 0"),
        ({"target__dtype": "float16"}, "target.dtype: float16 does not run on a CPU"),
        ({"target__path": ""}, "target.path: empty"),
        ({"extract__taps": [3, 1]}, "extract.taps: [3, 1] must be layer ids in rising order"),
        ({"extract__taps": [1, 1]}, "extract.taps: [1, 1]"),
        ({"extract__taps": []}, "extract.taps: []"),
        ({"extract__taps": [-1, 2]}, "extract.taps.0: -1"),
        ({"extract__batch_tokens": 100}, "cannot hold a sample of corpus.max_length 2048"),
        ({"score__budgets": [16, 16]}, "score.budgets: [16] stand there more than once"),
        ({"corpus__sources": []}, "none has `split: train`"),
        ({"corpus__sources": [{"path": "/b", "split": "heldout"}]}, "none has `split: train`"),
        ({"corpus__sources": [{"path": "/a", "limit": 0}]}, "corpus.sources.0.limit: 0"),
        ({"corpus__sources": [{"path": ""}]}, "corpus.sources.0.path: empty"),
        (
            {"corpus__sources": [{"path": "/x/a.jsonl"}, {"path": "/y/a.json"}]},
            '2 of them are named "a"',
        ),
        (
            {
                "corpus__sources": [
                    {"path": "/a"},
                    {"path": "/a", "name": "b", "split": "heldout"},
                ]
            },
            "is also trained on",
        ),
        (
            {"corpus__sources": [{"path": "/a"}], "corpus__validation_fraction": 0},
            "leaves no prompts to measure on",
        ),
        ({"corpus__template_args": {"a": math.nan}}, "corpus.template_args.a: nan"),
        ({"name": "../up"}, 'name: "../up" cannot name a folder'),
        ({"name": ""}, 'name: "" cannot name a folder'),
        ({"name": ".."}, "cannot name a folder"),
    ],
)
def test_t_89_impossible_values_and_combinations_are_refused(changes, expected):
    assert [c for c in complaints(recipe_with(**changes)) if expected in c]


@pytest.mark.parametrize("key", ["budgets", "walk_budgets"])
@pytest.mark.parametrize("budgets", [[0], [16, 0], [-1]])
def test_t_81_a_budget_below_one_is_a_config_error(key, budgets):
    lines = complaints(recipe_with(**{f"score__{key}": budgets}))
    assert lines[0].startswith(f"score.{key}.{len(budgets) - 1}: {budgets[-1]} is impossible.")


def test_all_problems_are_listed_a_line_each():
    lines = complaints(recipe_with(train__epochs=0, train__anchors=0, drafter__block_size=9999))
    assert [line.partition(":")[0] for line in lines] == [
        "train.epochs",
        "train.anchors",
        "drafter.block_size",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"target__dtype": "bfloat16"},
        {"target__dtype": "float16", "target__device": "cuda:0"},
        {"target__device": "cuda"},
        {"regenerate__temperature": 0.7, "regenerate__top_p": 0.9},
        {"regenerate__enabled": False, "regenerate__max_new_tokens": 4096},
        {"score__budgets": [], "score__walk_budgets": []},
        {"corpus__sources": [{"path": "/a"}]},
        {"corpus__validation_fraction": 0.0},
        {"drafter__block_size": 2048},
        {"extract__taps": [0, 3, 9]},
        {"train__epochs": 0.25},
        {"train__warmup_ratio": 0},
    ],
)
def test_unusual_but_possible_recipes_pass(changes):
    check_recipe(recipe_with(**changes))


def _numeric_keys(kind: Any = Recipe, prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, hint in typing.get_type_hints(kind).items():
        args = typing.get_args(hint)
        if hasattr(hint, "__dataclass_fields__"):
            found += _numeric_keys(hint, f"{prefix}{name}.")
        elif args and hasattr(args[0], "__dataclass_fields__"):
            found += _numeric_keys(args[0], f"{prefix}{name}.*.")
        elif re.search(r"\btuple\[(int|float)", str(hint)):
            found.append(f"{prefix}{name}.*")
        elif {hint, *args} & {int, float}:
            found.append(f"{prefix}{name}")
    return found


def test_every_number_of_the_schema_has_a_bound():
    assert sorted(_numeric_keys()) == sorted(key for key, _ in BOUNDS)


def test_without_heldout_data_there_is_a_note_and_no_refusal():
    recipe = recipe_with(corpus__sources=[{"path": "/a"}])
    check_recipe(recipe)
    assert any("split: heldout" in note for note in notes(recipe))
    assert notes(recipe_with()) == []


def _recipe_at(target: Path, *data: Path) -> Recipe:
    return recipe_with(
        target={"path": str(target)}, corpus__sources=[{"path": str(path)} for path in data]
    )


def test_paths_that_exist_pass(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "a.jsonl").write_text("")
    check_paths(_recipe_at(tmp_path / "model", tmp_path / "a.jsonl"))


def test_missing_paths_are_all_named_with_their_neighbours(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "chats.jsonl").write_text("")
    (tmp_path / "empty").mkdir()
    recipe = _recipe_at(
        tmp_path / "modle", tmp_path / "chat.jsonl", tmp_path / "empty",
        tmp_path / "none" / "x.jsonl",
    )  # fmt: skip
    with pytest.raises(RecipeError) as caught:
        check_paths(recipe)
    none, chats = tmp_path / "none", tmp_path / "chats.jsonl"
    forms = ".jsonl, .ndjson, .json, .parquet, .arrow, .txt, .md"
    no_data = f"no {forms} file is in it. It is empty."
    neighbour, parent = f"Did you mean {chats}?", f"{none} is no readable folder either."
    assert str(caught.value).splitlines() == [
        f"target.path: {tmp_path}/modle: no such folder. Did you mean {tmp_path}/model?",
        f"corpus.sources.0.path: {tmp_path}/chat.jsonl: no such file. {neighbour}",
        f"corpus.sources.1.path: {tmp_path}/empty: a folder without data: {no_data}",
        f"corpus.sources.2.path: {none}/x.jsonl: no such file. {parent}",
    ]


def test_a_target_that_is_no_model_folder_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(RecipeError, match=r"holds no config\.json"):
        check_paths(_recipe_at(tmp_path, tmp_path / "a.jsonl"))
    with pytest.raises(RecipeError, match="a file, not a model folder"):
        check_paths(_recipe_at(tmp_path / "a.jsonl", tmp_path / "a.jsonl"))


def test_check_recipe_touches_no_file():
    check_recipe(replace(recipe_with(), name="nowhere"))


def test_the_terms_of_an_objective_that_may_surprise_are_noted():
    terms = [{"kind": "cross_entropy", "positions": "streak"}, {"kind": "kl"}]
    base = len(notes(recipe_with(extract={"last": True}, train={"objective": terms})))
    terms += [{"kind": "reverse_kl"}, {"kind": "tv", "positions": "streak"}]
    found = notes(recipe_with(extract={"last": True}, train={"objective": terms}))
    assert len(found) == base + 2
    assert any("train.objective.2.kind: reverse_kl" in note for note in found)
    assert any("train.objective.3.positions: streak weights" in note for note in found)


def test_a_whole_objective_is_possible():
    terms = [
        {"kind": "cross_entropy", "positions": "streak_decay", "gamma": 10, "alpha": 0.3},
        {"kind": "kl", "temperature": 2, "weight": 0, "end_weight": 0.5, "ramp": [0.8, 0.8]},
        {"kind": "lk_hybrid", "eta": 2}, {"kind": "tree", "temperature": 0.5, "budget": 32},
        {"kind": "cross_entropy", "positions": "tree", "budget": 16, "temperature": 2},
    ]  # fmt: skip
    check_recipe(recipe_with(extract={"last": True}, train={"objective": terms}))
