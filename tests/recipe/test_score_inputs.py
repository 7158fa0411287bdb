"""How the score is asked for: data sets, conventions, and what stands in a fingerprint."""

import json
from dataclasses import replace

import pytest

from paceline.durable.errors import RecipeError
from paceline.recipe.check import check_paths, check_recipe, notes
from paceline.recipe.fingerprint import flatten
from paceline.recipe.load import load_recipe
from paceline.recipe.schema import (
    CorpusRecipe,
    Recipe,
    ScoreRecipe,
    ScoreSetRecipe,
    SourceRecipe,
    TargetRecipe,
)
from paceline.recipe.score_inputs import score_fields, score_settings


def recipe_of(*datasets: ScoreSetRecipe, **score: object) -> Recipe:
    return Recipe(
        target=TargetRecipe(path="/m"),
        corpus=CorpusRecipe(sources=(SourceRecipe(path="/train.jsonl"),)),
        score=ScoreRecipe(datasets=datasets, **score),
    )


@pytest.mark.parametrize(
    ("datasets", "said"),
    [
        ([ScoreSetRecipe(path="")], "score.datasets.0.path: empty. Give a file"),
        (
            [ScoreSetRecipe(path="/a/x.jsonl"), ScoreSetRecipe(path="/b/x.jsonl")],
            'score.datasets: 2 of them are named "x"',
        ),
        (
            [ScoreSetRecipe(path="/train.jsonl")],
            "score.datasets.0.path: /train.jsonl is also trained on",
        ),
        ([ScoreSetRecipe(path="/a", limit=0)], "score.datasets.0.limit: 0 is impossible"),
    ],
)
def test_what_cannot_be_scored_on_is_told(datasets, said):
    with pytest.raises(RecipeError, match=said.replace(".", r"\.")):
        check_recipe(recipe_of(*datasets))


def test_data_sets_of_the_score_stand_in_for_held_out_sources():
    assert any("none has `split: heldout`" in note for note in notes(recipe_of()))
    asked = recipe_of(ScoreSetRecipe(path="/q.jsonl"))
    assert not any("none has `split: heldout`" in note for note in notes(asked))
    bare = replace(asked, corpus=replace(asked.corpus, validation_fraction=0.0))
    check_recipe(bare)


def test_a_filter_without_a_temperature_is_noted():
    assert any("top_k has no effect" in n for n in notes(recipe_of(top_k=5)))
    assert not any("no effect" in n for n in notes(recipe_of(top_k=5, temperatures=(0.7,))))
    assert not any("no effect" in n for n in notes(recipe_of(top_k=5, convention="dflash")))


def test_temperatures_are_the_conventions_unless_the_recipe_says_otherwise():
    assert score_settings(recipe_of(convention="dflash").score).temperatures == (0.0, 1.0)
    said = recipe_of(convention="dflash", temperatures=(0.5,))
    assert score_settings(said.score).temperatures == (0.5,)
    with pytest.raises(RecipeError, match="each temperature once"):
        check_recipe(recipe_of(temperatures=(0.5, 0.5)))


def test_paths_become_absolute_and_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text("score: {datasets: [{path: questions.jsonl, adapter: mt_bench}]}\n")
    recipe = load_recipe(path)
    assert recipe.score.datasets[0].path == str(tmp_path / "questions.jsonl")
    with pytest.raises(RecipeError, match=r"score\.datasets\.0\.path: .*no such file"):
        check_paths(recipe)


def test_an_unknown_adapter_is_refused_with_the_right_one(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("score:\n  datasets:\n  - {path: a.jsonl, adapter: mtbench}\n")
    with pytest.raises(RecipeError, match=r"score\.datasets\.0\.adapter: .*Did you mean mt_bench"):
        load_recipe(path)


def test_a_plain_score_has_the_fields_of_older_versions():
    """So that those of a finished run differ by their format alone."""
    assert set(score_fields(ScoreRecipe())) == {
        "max_prompts", "max_new_tokens", "budgets", "walk_budgets", "walk_check_prompts", "seed",
    }  # fmt: skip
    assert score_fields(ScoreRecipe())["max_new_tokens"] == 256
    assert score_fields(ScoreRecipe())["seed"] == 0


def test_the_content_of_a_data_set_counts_and_where_it_lies_does_not(tmp_path):
    def fields(folder: str, text: str) -> dict:
        place = tmp_path / folder / "q.jsonl"
        place.parent.mkdir(exist_ok=True)
        place.write_text(json.dumps({"prompt": text}))
        return flatten(score_fields(ScoreRecipe(datasets=(ScoreSetRecipe(path=str(place)),))))

    one = fields("a", "x")
    assert fields("b", "x") == one
    assert fields("a", "y") != one


def test_limits_go_from_the_data_set_over_the_recipe_to_the_convention():
    asked = ScoreSetRecipe(path="/q", adapter="gsm8k", limit=3)
    open_ended = replace(asked, limit=None)
    settings = score_settings(ScoreRecipe(convention="dflash", max_prompts=9))
    assert settings.limit_of(asked) == 3
    assert settings.limit_of(open_ended) == 9
    assert score_settings(ScoreRecipe(convention="dflash")).limit_of(open_ended) == 128
    assert score_settings(ScoreRecipe()).limit_of(open_ended) is None
    prompts = replace(open_ended, adapter="prompts")
    assert score_settings(ScoreRecipe(convention="dflash")).limit_of(prompts) is None
