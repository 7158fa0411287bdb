"""What a recipe may say of trackers."""

from dataclasses import replace

import pytest

from paceline.durable.errors import RecipeError
from paceline.recipe.check import check_recipe
from paceline.recipe.load import load_recipe
from paceline.recipe.schema import CorpusRecipe, ExtractRecipe, Recipe, SourceRecipe, TargetRecipe
from paceline.recipe.training import training_fields
from paceline.recipe.write import template

VALID = Recipe(
    target=TargetRecipe(path="target"),
    corpus=CorpusRecipe(sources=(SourceRecipe(path="chats.jsonl"),)),
)


def tracked(**changes: object) -> Recipe:
    return replace(VALID, train=replace(VALID.train, **changes))


def refusal(recipe: Recipe) -> str:
    with pytest.raises(RecipeError) as raised:
        check_recipe(recipe)
    return str(raised.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trackers": ("wandb", "trackio", "tensorboard", "mlflow")},
        {"trackers": ("wandb",), "tracker_options": {"entity": "us", "mode": "offline"}},
        {"trackers": ("mlflow",), "tracker_options": {"tracking_uri": "https://host:5000"}},
    ],
)
def test_what_is_possible_passes_and_changes_no_fingerprint(changes):
    recipe = tracked(**changes)
    check_recipe(recipe)
    assert training_fields(recipe.train) == training_fields(VALID.train)


@pytest.mark.parametrize("name", ["api_key", "wandb_token", "password", "MLFLOW_SECRET"])
def test_a_secret_among_the_options_is_refused_without_being_repeated(name):
    said = refusal(tracked(trackers=("wandb",), tracker_options={name: "hunter2"}))
    assert f"train.tracker_options.{name}: credentials do not belong into a recipe" in said
    assert "environment (WANDB_API_KEY" in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    ("key", "recipe"),
    [
        (
            "train.tracker_options.tracking_uri",
            tracked(
                trackers=("mlflow",), tracker_options={"tracking_uri": "https://me:hunter2@host"}
            ),
        ),
        (
            "train.tracker_options.server_url",
            tracked(
                trackers=("trackio",),
                tracker_options={"server_url": "https://host/?write_token=hunter2"},
            ),
        ),
        (
            "extract.store_options.proxy_url",
            replace(
                VALID,
                extract=ExtractRecipe(
                    store="s3://b/p", store_options={"proxy_url": "http://me:hunter2@proxy"}
                ),
            ),
        ),
    ],
)
def test_a_url_with_a_secret_is_refused_without_being_repeated(key, recipe):
    said = refusal(recipe)
    assert f"{key}: a url with a password or a token in it." in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trackers": ("mlflow", "mlflow")}, "names one twice"),
        ({"tracker_project": "a/b"}, 'train.tracker_project: "a/b" is no name'),
        (
            {"trackers": ("wandb",), "tracker_options": {"entiti": "us"}},
            "train.tracker_options.entiti: no such option. Give entity, group, mode, server_url",
        ),
        (
            {"trackers": ("wandb",), "tracker_options": {"tracking_uri": "x"}},
            "train.tracker_options.tracking_uri: only mlflow takes it",
        ),
    ],
)
def test_a_mistake_is_named(changes, said):
    assert said in refusal(tracked(**changes))


def test_an_unknown_tracker_is_refused_with_its_line(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("name: demo\ntrain:\n  trackers: [wandb, comet]\n")
    with pytest.raises(RecipeError, match=r"recipe.yaml, line 3: train.trackers: expected .*comet"):
        load_recipe(path)


def test_trackers_can_be_set_on_the_command_line_and_read_back(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(template(VALID))
    recipe = load_recipe(path, ["train.trackers=[wandb]", "train.tracker_options.entity=us"])
    assert recipe.train.trackers == ("wandb",)
    assert recipe.train.tracker_options == {"entity": "us"}
