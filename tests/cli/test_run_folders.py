"""Where a run may lie, and what it must not replace."""

import json

import pytest

from paceline.cli.main import main
from tiny_models import tiny_model

RECIPE = """
target: {path: target}
corpus: {sources: [{path: rows.jsonl}], max_length: 64, validation_fraction: 0.3}
regenerate: {max_new_tokens: 4, on_length: keep}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    tiny_model("llama", tmp_path / "target")
    turns = ({"messages": [{"role": "user", "content": f"q {i}"}]} for i in range(12))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(t) + "\n" for t in turns))
    (tmp_path / "recipe.yaml").write_text("# my own notes\n" + RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("given", ["recipe.yaml", "other.yaml"])
def test_a_recipe_of_the_user_s_is_never_replaced(folder, capsys, given):
    (folder / "other.yaml").write_text(RECIPE)
    before = (folder / "recipe.yaml").read_bytes()
    assert main(["prepare", given, "--run", "."]) == 2
    assert "was not written by a run" in capsys.readouterr().err
    assert (folder / "recipe.yaml").read_bytes() == before
    assert not (folder / "owner.lock").exists()


def test_a_run_inside_a_run_is_refused(folder, capsys):
    assert main(["prepare", "recipe.yaml", "--run", "out"]) == 0
    assert main(["prepare", "recipe.yaml", "--run", "out/corpus/inner"]) == 2
    assert "lies inside the run" in capsys.readouterr().err


def test_data_that_was_moved_stops_only_what_reads_it(folder, capsys):
    assert main(["prepare", "recipe.yaml", "--run", "out"]) == 0
    (folder / "rows.jsonl").rename(folder / "moved.jsonl")
    assert main(["regenerate", "--run", "out"]) == 0
    assert main(["prepare", "--run", "out"]) == 2
    assert "rows.jsonl: no such file" in capsys.readouterr().err


def test_nothing_to_score_is_said_before_the_work(folder, capsys):
    few = "".join((folder / "rows.jsonl").read_text().splitlines(keepends=True)[:1])
    (folder / "rows.jsonl").write_text(few)
    arguments = ["run", "recipe.yaml", "--run", "out", "--set", "corpus.validation_fraction=0.01"]
    assert main(arguments) == 2
    assert "there would be nothing to score" in capsys.readouterr().err
    assert not (folder / "out" / "features").exists()
