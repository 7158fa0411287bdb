"""Online training and several drafters, by the words of the recipe alone."""

from dataclasses import replace

import pytest

from paceline.recipe.check import check_recipe, notes
from paceline.recipe.convert import convert_recipe
from paceline.recipe.online import capture_devices, online_notes, online_problems, training_devices
from paceline.recipe.schema import CorpusRecipe, Recipe, TargetRecipe, TrainRecipe
from paceline.recipe.training import resolved_compute, training_fields

ONLINE = TrainRecipe(online=True, target_devices=("cuda:0",), drafter_devices=("cuda:1",))


def recipe_with(train: TrainRecipe, **target: str) -> Recipe:
    return Recipe(target=TargetRecipe(path="/m", **target), train=train)  # type: ignore[arg-type]


def problems(train: TrainRecipe, **target: str) -> list[str]:
    return list(online_problems(recipe_with(train, **target)))


@pytest.mark.parametrize(
    "train",
    [
        TrainRecipe(),
        TrainRecipe(online=True),
        ONLINE,
        TrainRecipe(online=True, target_devices=("cpu:0", "cpu:1"), drafter_devices=("cpu",)),
        TrainRecipe(drafter_devices=("cuda:3", "cuda:12")),
    ],
)
def test_what_is_possible(train):
    assert problems(train) == []
    tree = {"target": {"path": "/m"}, "corpus": {"sources": [{"path": "/a.jsonl"}]}}
    recipe, _ = convert_recipe(tree)
    assert recipe is not None
    check_recipe(replace(recipe, train=train))


@pytest.mark.parametrize(
    "device", ["cuda", "gpu:0", "cuda:", "cuda:-1", "0", "cpu:", "", "cpu:00", "cuda:01"]
)
@pytest.mark.parametrize("key", ["target_devices", "drafter_devices"])
def test_a_name_that_is_no_device_is_refused(key, device):
    train = replace(ONLINE, **{key: ("cuda:5", device)})
    (problem,) = problems(train)
    assert problem.startswith(f'train.{key}: "{device}" is no device. Give cuda:0')


def test_a_device_stands_once_in_each_list():
    train = replace(ONLINE, target_devices=("cuda:0", "cpu:1", "cuda:0", "cpu:1"))
    (problem,) = problems(train)
    assert problem.startswith("train.target_devices: cpu:1, cuda:0 stands there more than once")


def test_without_validation_samples_nothing_could_be_evaluated_on():
    recipe = Recipe(corpus=CorpusRecipe(validation_fraction=0.0), train=ONLINE)
    (problem,) = online_problems(recipe)
    assert problem.startswith("train.online: ")
    assert "corpus.validation_fraction 0" in problem
    assert not list(online_problems(replace(recipe, train=TrainRecipe())))


def test_float16_does_not_run_on_a_cpu():
    train = replace(ONLINE, target_devices=("cuda:0", "cpu:1"))
    (problem,) = problems(train, dtype="float16", device="cuda:0")
    assert problem.startswith("train.target_devices: target.dtype float16 does not run on a CPU")
    assert problems(ONLINE, dtype="float16", device="cuda:0") == []


def test_what_has_no_effect_or_does_both_is_noted():
    def noted(train: TrainRecipe) -> list[str]:
        return list(online_notes(recipe_with(train)))

    assert noted(ONLINE) == noted(TrainRecipe(drafter_devices=("cuda:0",))) == []
    (idle,) = noted(TrainRecipe(target_devices=("cuda:0",)))
    assert idle == "train.target_devices has no effect without train.online."
    (window,) = noted(replace(ONLINE, shard_window=4))
    assert window.startswith("train.shard_window has no effect with train.online")
    (both,) = noted(replace(ONLINE, drafter_devices=("cuda:0", "cuda:1")))
    assert "cuda:0 does both" in both
    assert noted(replace(ONLINE, target_devices=("cpu:0",), drafter_devices=("cpu:0",))) == []
    assert idle in notes(recipe_with(TrainRecipe(target_devices=("cuda:0",))))


def test_devices_that_are_not_named_are_those_of_the_other_stages():
    recipe = recipe_with(TrainRecipe(online=True, device="cuda:1"), device="cuda:0")
    assert capture_devices(recipe) == ("cuda:0",)
    assert training_devices(recipe.train) == ("cuda:1",)
    assert capture_devices(recipe_with(replace(ONLINE, online=False))) == ()
    assert capture_devices(recipe_with(ONLINE)) == ("cuda:0",)
    assert training_devices(ONLINE) == ("cuda:1",)


def test_the_compute_type_is_that_of_the_devices_that_train():
    """`train.device` is nobody's where drafters have devices of their own."""
    assert resolved_compute(TrainRecipe(drafter_devices=("cuda:1",))) == "bfloat16"
    assert resolved_compute(TrainRecipe(device="cuda:0", drafter_devices=("cpu:1",))) == "float32"
    one, other = TrainRecipe(device="cuda:0"), TrainRecipe(drafter_devices=("cuda:1", "cuda:2"))
    assert training_fields(one) == training_fields(other)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (TrainRecipe(tee=True), "train.tee has no effect without train.online"),
        (replace(ONLINE, tee=True, epochs=1.0), "train.tee: of a single epoch nothing"),
    ],
)
def test_what_is_kept_for_nobody_is_told(train, said):
    assert any(note.startswith(said) for note in online_notes(Recipe(train=train)))
    wanted = replace(ONLINE, tee=True, epochs=2.0)
    assert not any("tee" in note for note in online_notes(Recipe(train=wanted)))
