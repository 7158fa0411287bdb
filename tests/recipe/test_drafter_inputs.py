"""What the drafter's recipe says of files: judged by name first, then by what lies there."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.durable.errors import DataError, RecipeError
from paceline.recipe.check import check_paths, check_recipe
from paceline.recipe.drafter_inputs import drafter_input_fields
from paceline.recipe.load import load_recipe, resolve_paths
from paceline.recipe.schema import (
    CorpusRecipe,
    DrafterRecipe,
    Recipe,
    SourceRecipe,
    TargetRecipe,
)
from paceline.recipe.stage import StageRecord


def recipe_at(folder: Path, **drafter) -> Recipe:
    (folder / "model").mkdir(exist_ok=True)
    for name in ("model/config.json", "a.jsonl"):
        (folder / name).write_text("{}")
    return Recipe(
        target=TargetRecipe(path=str(folder / "model")),
        corpus=CorpusRecipe(sources=(SourceRecipe(path=str(folder / "a.jsonl")),)),
        drafter=DrafterRecipe(**drafter),
    )


def complaint(check, recipe: Recipe) -> str:
    with pytest.raises(RecipeError) as caught:
        check(recipe)
    return str(caught.value)


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        ({"draft_vocab": 8, "vocab_text": ("/t.csv",)}, "0: /t.csv: unknown form '.csv'"),
        ({"draft_vocab": 8, "vocab_text": ("/t.txt", "")}, "drafter.vocab_text.1: empty"),
        ({"vocab_text": ("/t.txt",)}, "drafter.vocab_text: counted to choose the tokens"),
        ({"vocab_text": ("/t.txt",), "warm_start": "/d"}, "keeps the vocabulary of its source"),
        ({"warm_start": ""}, "drafter.warm_start: empty"),
        ({"draft_vocab": 0}, "drafter.draft_vocab: 0 is impossible"),
    ],
)  # fmt: skip
def test_impossible_words_are_refused(tmp_path, drafter, expected):
    assert expected in complaint(check_recipe, recipe_at(tmp_path, **drafter))


@pytest.mark.parametrize("name", ["t.txt", "t.MD", "t.jsonl", "t.json", "t.ndjson"])
def test_texts_and_rows_are_taken(tmp_path, name):
    (tmp_path / name).write_text("")
    recipe = recipe_at(tmp_path, draft_vocab=8, vocab_text=(str(tmp_path / name),))
    check_recipe(recipe)
    check_paths(recipe)


def test_missing_files_are_named_with_their_neighbours(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("")
    (tmp_path / "drafter").mkdir()
    recipe = recipe_at(
        tmp_path,
        vocab_text=(str(tmp_path / "word.txt"), str(tmp_path)),
        warm_start=str(tmp_path / "draftr"),
    )
    assert complaint(check_paths, recipe).splitlines() == [
        f"drafter.vocab_text.0: {tmp_path}/word.txt: no such file. Did you mean {words}?",
        f"drafter.vocab_text.1: {tmp_path}: a folder; name a file in it.",
        f"drafter.warm_start: {tmp_path}/draftr: no such folder. Did you mean {tmp_path}/drafter?",
    ]
    check_paths(recipe, drafter=False)


def test_a_folder_without_a_drafter_is_refused(tmp_path):
    folder = tmp_path / "drafter"
    folder.mkdir()
    recipe = recipe_at(tmp_path, warm_start=str(folder))
    message = complaint(check_paths, recipe)
    assert "no drafter there (config.json and model.safetensors missing)" in message
    (folder / "config.json").write_text("{}")
    assert "no drafter there (model.safetensors missing)" in complaint(check_paths, recipe)
    (folder / "model.safetensors").write_text("")
    check_paths(recipe)
    file = recipe_at(tmp_path, warm_start=str(folder / "config.json"))
    assert "a file, not a drafter's folder" in complaint(check_paths, file)


@pytest.mark.parametrize("inner", ["", "checkpoints"])
def test_of_a_run_the_checkpoint_to_name_is_said(tmp_path, inner):
    """It is not taken: which one is best may change."""
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in (10, 20, 30):
        (checkpoints / f"step_{step:06d}").mkdir(parents=True)
    recipe = recipe_at(tmp_path, warm_start=str(tmp_path / "run" / inner))
    message = complaint(check_paths, recipe)
    assert "its training has not ended" in message
    assert f"{checkpoints / 'step_000010'} to step_000030" in message
    record = StageRecord(checkpoints, "train", {"a": 1})
    record.begin()
    assert "has not ended" in complaint(check_paths, recipe)
    record.finish([], {"best": "step_000020"})
    message = complaint(check_paths, recipe)
    assert f"Name a checkpoint of it; its best is {checkpoints / 'step_000020'}." in message
    (checkpoints / "train.stage.json").write_text("{")
    assert "has not ended" in complaint(check_paths, recipe)


def test_contents_count_paths_do_not(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.txt").write_text("text")
        for file in ("config.json", "model.safetensors"):
            (tmp_path / name / file).write_text(file)

    def fields(name: str) -> dict:
        text = (str(tmp_path / name / "t.txt"),)
        return drafter_input_fields(DrafterRecipe(vocab_text=text, warm_start=str(tmp_path / name)))

    assert set(fields("one")) == {"vocab_text.0.content", "warm_start.config", "warm_start.weights"}
    assert fields("one") == fields("two")
    for file, key in (("t.txt", "vocab_text.0.content"), ("config.json", "warm_start.config"),
                      ("model.safetensors", "warm_start.weights")):  # fmt: skip
        before = fields("two")
        (tmp_path / "two" / file).write_text("other")
        assert {k for k, v in fields("two").items() if v != before[k]} == {key}
    (tmp_path / "two" / "t.txt").unlink()
    with pytest.raises(DataError, match=r"t\.txt: no such file"):
        fields("two")
    assert drafter_input_fields(DrafterRecipe()) == {}


def test_their_paths_are_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("drafter: {warm_start: d, vocab_text: [a.txt, ~/b.txt]}")
    drafter = load_recipe(Path("r.yaml")).drafter
    assert drafter.warm_start == str(tmp_path / "d")
    assert drafter.vocab_text == (str(tmp_path / "a.txt"), str(Path("~/b.txt").expanduser()))
    bare = Recipe(drafter=replace(drafter, warm_start=None))
    assert resolve_paths(bare).drafter.warm_start is None
