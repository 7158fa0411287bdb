import json

import pytest

import foreign_caches as caches
from paceline.cli.main import main
from paceline.durable.owner import LOCK, owned
from paceline.recipe.load import load_recipe
from paceline.recipe.run_dir import RunDir
from tiny_models import tiny_model

RECIPE = """
name: demo
target: {path: target, threads: 1}
corpus: {sources: [{path: data.jsonl}], max_length: 128, validation_fraction: 0.2}
regenerate: {enabled: false}
extract: {taps: [1, 4], last: true, shard_bytes: 16384, isolate: false}
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with a target and a recipe."""
    folder = tmp_path_factory.mktemp("project")
    tiny_model("llama", folder / "target", layers=8)
    rows = [
        {"messages": [{"role": "user", "content": f"question {n}"},
                      {"role": "assistant", "content": f"answer {n}" * (n % 4 + 1)}]}
        for n in range(16)
    ]  # fmt: skip
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.fixture
def run(prepared, tmp_path, monkeypatch):
    """A run that has its corpus."""
    monkeypatch.chdir(prepared)
    assert main(["prepare", "recipe.yaml", "--run", str(tmp_path / "run")]) == 0
    return RunDir(tmp_path / "run")


def states_of(run: RunDir):
    return caches.true_states(load_recipe(run.recipe), run)


def test_a_cache_is_imported_and_extract_publishes_it(run, tmp_path, capsys):
    cache = caches.write_specforge(tmp_path / "cache", states_of(run))
    command = ["import", str(run.root), str(cache), "--from", "specforge"]
    capsys.readouterr()
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "read as `--layers 1,3,4 --convention output-after --last normed`" in shown.err
    assert "16 files read: 16 used, 0 of no sample of this corpus, 0 unreadable." in shown.out
    assert f"`paceline extract --run {run.root}` looks at them and publishes" in shown.out
    assert main(["status", str(run.root)]) == 1
    shown = capsys.readouterr().out
    assert "extract     interrupted  16 of 16 samples" in shown
    assert "An import left it here. All 16 shards are there: " in " ".join(shown.split())
    assert main(["extract", "--run", str(run.root)]) == 0
    assert "0 new, 0 errors" in capsys.readouterr().out
    assert main(["verify", str(run.root), "--deep"]) == 0
    capsys.readouterr()
    assert main(command) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert main(["status", str(run.root)]) == 0


def test_what_the_tool_counts_otherwise_is_said_with_the_flags(run, tmp_path, capsys):
    cache = caches.write_speculators(tmp_path / "cache", states_of(run), (2, 5))
    command = ["import", str(run.root), str(cache), "--from", "speculators", "--layers", "2,5"]
    assert main([*command, "--convention", "output-after", "--set", "x"]) == 2
    more = ["--last", "un-normed", "--check", "1"]
    assert main([*command[:-1], "1,4,7", "--last", "normed"]) == 2
    assert "--last normed" in capsys.readouterr().err
    assert main([*command[:-1], "1,4", *more]) == 2
    refused = capsys.readouterr().err
    assert "by `--layers 1,4 --convention input-of --last un-normed` it has" in refused
    assert main([*command[:-1], "1,4", "--convention", "output-after", *more]) == 0
    assert "--layers 1,4 --convention output-after --last un-normed" in capsys.readouterr().err


def test_unreadable_files_end_with_1_and_their_names(run, tmp_path, capsys):
    cache = caches.write_specforge(tmp_path / "cache", states_of(run))
    (cache / "broken.ckpt").write_bytes(b"PK\x03\x04 and no more")
    assert main(["import", str(run.root), str(cache), "--from", "specforge"]) == 1
    shown = capsys.readouterr().out
    assert "not done: 1 file cut off or damaged: broken.ckpt: " in shown


def test_it_refuses_what_it_cannot_work_on(run, tmp_path, capsys):
    cache = tmp_path / "cache"
    command = ["import", str(run.root), str(cache), "--from", "specforge"]
    with owned(run.root, "paceline extract"):
        assert main(command) == 2
        assert "`paceline extract` is at work in this run directory" in capsys.readouterr().err
    assert main(command) == 2
    assert "no such folder" in capsys.readouterr().err
    assert not (run.root / LOCK).read_bytes()
    assert main(["import", str(tmp_path), str(cache), "--from", "specforge"]) == 2
    assert "not a run directory" in capsys.readouterr().err
    assert main([*command, "--layers", "one"]) == 2
    assert "--layers one: give ids with commas" in capsys.readouterr().err
    assert main([*command, "--check", "-1"]) == 2
    assert main([*command[:-1], "eagle"]) == 2
    run.prepared.unlink()
    assert main(command) == 1
    assert "prepared.jsonl: missing" in capsys.readouterr().err
    assert not run.features.exists()
