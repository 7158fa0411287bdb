"""Other drafters as a user asks for them: a reduced vocabulary, and a start from a trained one."""

import json
import logging
from pathlib import Path

import pytest

from paceline.cli.main import main
from tiny_run import tiny_project


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("project")
    (root / "words.txt").write_text("to be or not to be, that is the question\n" * 50)
    (root / "rows.jsonl").write_text(json.dumps({"text": "some more text"}) + "\n")
    return tiny_project(root)


def run(recipe: Path, name: str, *overrides: str) -> tuple[int, Path]:
    folder = recipe.parent / name
    flags = [part for text in overrides for part in ("--set", text)]
    try:
        return main(["run", str(recipe), "--run", str(folder), *flags]), folder
    finally:
        logging.getLogger().handlers.clear()


@pytest.fixture(scope="module")
def reduced(recipe) -> Path:
    texts = f"[{recipe.parent / 'words.txt'}, {recipe.parent / 'rows.jsonl'}]"
    code, folder = run(recipe, "reduced", "drafter.draft_vocab=40", f"drafter.vocab_text={texts}")
    assert code == 0
    return folder


def best(folder: Path) -> Path:
    record = json.loads((folder / "checkpoints" / "train.stage.json").read_text())
    return folder / "checkpoints" / record["report"]["best"]


def test_a_reduced_vocabulary_is_trained_and_scored_without_loss(reduced):
    result = json.loads((reduced / "score" / "result.json").read_text())
    assert result["lossless"]["violations"] == []
    assert result["pooled"]["chain"]["tau"] >= 1.0
    report = json.loads((reduced / "checkpoints" / "train.stage.json").read_text())["report"]
    counted = report["draft_vocabulary"]
    assert counted["size"] == 40
    assert counted["text_tokens"] == 50 * 41 + len("some more text")
    assert json.loads((best(reduced) / "config.json").read_text())["draft_vocab_size"] == 40


def test_score_refuses_a_text_that_changed(reduced, recipe, capsys):
    words = recipe.parent / "words.txt"
    before = words.read_text()
    words.write_text("other words")
    try:
        code = main(["score", "--run", str(reduced)])
    finally:
        words.write_text(before)
        logging.getLogger().handlers.clear()
    assert code == 2
    assert "vocab_text.0.content (the data file itself has changed)" in capsys.readouterr().err


def test_a_second_run_starts_from_the_first(recipe, reduced, capsys):
    code, folder = run(
        recipe, "warm", f"drafter.warm_start={best(reduced)}", "drafter.block_size=6"
    )
    assert code == 0
    assert "note: drafter.warm_start: " in capsys.readouterr().out, "said before any work"
    config = json.loads((best(folder) / "config.json").read_text())
    assert (config["block_size"], config["draft_vocab_size"]) == (6, 40)
    result = json.loads((folder / "score" / "result.json").read_text())
    assert result["lossless"]["violations"] == []


@pytest.mark.parametrize(
    ("start", "more", "expected"),
    [
        (".", (), "Name a checkpoint of it; its best is "),
        ("checkpoints/step_999999", (), "no such folder"),
        ("best", ("drafter.layers=2",), "drafter.layers: 1 -> 2"),
    ],
)
def test_what_cannot_be_started_from_is_refused_before_any_work(
    recipe, reduced, capsys, start, more, expected
):
    source = best(reduced) if start == "best" else reduced / start
    code, folder = run(recipe, "refused", f"drafter.warm_start={source}", *more)
    assert code == 2
    assert expected in capsys.readouterr().err
    assert not folder.exists()
