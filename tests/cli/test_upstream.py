"""A stage alone builds on earlier ones only where this recipe made them and they are whole."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import paceline
from paceline.cli.main import main
from paceline.recipe.run_dir import RunDir
from paceline.recipe.stage import read_record
from tiny_run import tiny_project

STAGES = ("prepare", "regenerate", "extract", "train", "score")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A project, and in it a run of all stages but the score."""
    root = tmp_path_factory.mktemp("finished")
    tiny_project(root)
    for stage in STAGES[:-1]:
        assert main([stage, str(root / "recipe.yaml"), "--run", str(root / "run")]) == 0
    return root


@pytest.fixture
def run(finished, tmp_path) -> RunDir:
    return RunDir(shutil.copytree(finished / "run", tmp_path / "run"))


def go(stage: str, run: RunDir, finished: Path, *changes: str) -> int:
    sets = [word for change in changes for word in ("--set", change)]
    return main([stage, str(finished / "recipe.yaml"), "--run", str(run.root), *sets])


def contents(run: RunDir) -> dict[Path, bytes]:
    left_out = (run.events, run.root / "owner.lock")
    return {
        p: p.read_bytes()
        for p in run.root.rglob("*")
        if p.is_file() and not any(p.is_relative_to(folder) for folder in left_out)
    }


@pytest.mark.parametrize(
    ("stage", "change", "said"),
    [
        ("score", "corpus.max_length=60", "corpus.max_length: 64 -> 60"),
        ("train", "corpus.seed=1", "corpus.seed: 0 -> 1"),
        ("regenerate", "corpus.template_args={a: 1}", "corpus.template_args.a: '(absent)' -> 1"),
        ("extract", "corpus.sources.0.limit=9", "sources.0.limit: None -> 9"),
        ("score", "corpus.sources.1.name=other", "sources.1.name: 'held' -> 'other'"),
        ("extract", "regenerate.max_new_tokens=7", "regenerate.max_new_tokens: 8 -> 7"),
        ("score", "regenerate.enabled=false", "regenerate.enabled: True -> False"),
        ("extract", "target.dtype=bfloat16", "target.dtype: 'float32' -> 'bfloat16'"),
        ("train", "extract.num_taps=2", "extract.layer_ids.2: 3 -> '(absent)'"),
        ("score", "extract.taps=[1, 2]", "extract.layer_ids.2: 3 -> '(absent)'"),
        ("train", "extract.dtype=float32", "extract.dtype: 'bfloat16' -> 'float32'"),
        ("train", "extract.codec=planes", "extract.codec: 'none' -> 'planes'"),
        (
            "train",
            "train.online=true",
            "extract.samples (train.online decides): 'all' -> 'validation'",
        ),
        ("score", "train.online=true", "extract.samples (train.online decides): 'all' -> "),
        ("score", "drafter.layers=2", "drafter.layers: 1 -> 2"),
        ("score", "train.betas=[0.9, 0.99]", "train.betas.1: 0.95 -> 0.99"),
    ],
)
def test_a_change_of_an_earlier_stage_is_refused_by_a_later_one(
    run, finished, capsys, stage, change, said
):
    before = contents(run)
    assert go(stage, run, finished, change) == 2
    err = capsys.readouterr().err
    assert said in err
    assert f"which {stage} builds on" in err
    assert contents(run) == before, "refused before any work"


@pytest.mark.parametrize(
    "change",
    [
        "target.threads=2",
        "extract.batch_tokens=300",
        "extract.taps=[1, 2, 3]",
        "extract.codec=none",  # what `auto` meant
    ],
)
def test_what_determines_no_content_is_no_change(run, finished, change):
    assert go("train", run, finished, change) == 0


@pytest.mark.parametrize(
    ("stage", "folder", "missing"),
    [
        ("regenerate", "corpus", "prepare"),
        ("extract", "corpus", "prepare"),
        ("train", "features", "extract"),
        ("score", "checkpoints", "train"),
    ],
)
def test_a_missing_stage_is_named(run, finished, capsys, stage, folder, missing):
    shutil.rmtree(run.root / folder)
    assert go(stage, run, finished) == 2
    assert f"`paceline {missing}` has not come to its end here" in capsys.readouterr().err


@pytest.mark.parametrize("harm", ["flip", "cut", "gone"])
@pytest.mark.parametrize(
    ("stage", "pattern", "maker"),
    [
        ("regenerate", "corpus/prepared.jsonl", "prepare"),
        ("extract", "corpus/regenerated.jsonl", "regenerate"),
        ("train", "corpus/regenerated.jsonl", "regenerate"),
        ("train", "features/manifest.json", "extract"),
        ("score", "corpus/regenerated.jsonl", "regenerate"),
        ("score", "checkpoints/BEST/model.safetensors", "train"),
        ("score", "checkpoints/BEST/config.json", "train"),
    ],
)
def test_a_damaged_input_is_never_used(run, finished, capsys, stage, pattern, maker, harm):
    record = read_record(run.checkpoints, "train")
    assert record is not None
    path = run.root / pattern.replace("BEST", record.report["best"])
    whole = path.read_bytes()
    path.unlink()
    if harm != "gone":
        at = len(whole) // 2
        path.write_bytes(
            whole[:at] if harm == "cut" else whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        )
    # The stage starts from nothing, so no fingerprint of its own could tell.
    for record in run.root.rglob(f"{stage}.stage.json"):
        record.unlink()
    assert go(stage, run, finished) == 1
    err = capsys.readouterr().err
    assert f"{path}: missing, or not as `paceline {maker}` wrote it" in err
    assert "Traceback" not in err
    assert go(maker, run, finished) == 0
    assert path.read_bytes() == whole


def test_another_targets_answers_and_states_are_refused(run, finished, tmp_path, capsys):
    other = shutil.copytree(finished / "target", tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    change = f"target.path={other}"
    shutil.rmtree(run.checkpoints)
    assert go("train", run, finished, change) == 2
    assert "the features are those of another target" in capsys.readouterr().err
    shutil.rmtree(run.features)
    assert go("extract", run, finished, change) == 2
    assert "the answers are those of another target" in capsys.readouterr().err


def test_a_score_of_another_recipe_is_never_mixed_in(run, finished, capsys):
    """The journal outlives a record that was removed by hand, as its own error advises."""
    assert go("score", run, finished) == 0
    (run.score / "score.stage.json").unlink()
    assert go("score", run, finished, "score.max_new_tokens=3") == 0
    result = json.loads((run.score / "result.json").read_bytes())
    assert {len(p["answer_ids"]) for p in result["prompts"]} == {3}


def test_another_score_is_told_before_any_stage_begins(run, finished, capsys):
    assert go("score", run, finished) == 0
    questions = finished / "questions.jsonl"
    questions.write_text(json.dumps({"prompt": "how are you"}) + "\n")
    before = contents(run)
    change = f"score.datasets=[{{path: {questions}}}]"
    assert go("run", run, finished, change) == 2
    told = capsys.readouterr()
    assert "score.datasets.0.adapter: '(absent)' -> 'prompts'" in told.err
    assert "== prepare" not in told.out
    assert go("run", run, finished, "score.convention=eagle") == 2
    assert "score.convention: '(absent)' -> 'eagle'" in capsys.readouterr().err
    assert contents(run) == before
    assert go("run", run, finished) == 0


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("chat_template.jinja", "<|im_start|>", "<|im_start|> ", "template: "),
        (
            "tokenizer.json",
            '"a": 97,\n      "b": 98',
            '"a": 98,\n      "b": 97',
            "tokenizer: ",
        ),
        ("generation_config.json", '"eos_token_id": 257', '"eos_token_id": 258', "end_tokens.1: "),
    ],
)
@pytest.mark.parametrize("stage", ["regenerate", "train", "score"])
def test_a_target_that_renders_otherwise_now_is_refused(
    finished, tmp_path, capsys, stage, file, old, new, said
):
    """Its weights are the same: only what `prepare` recorded tells."""
    project = shutil.copytree(finished, tmp_path / "project")
    shutil.rmtree(project / "run")
    shutil.copytree(finished / "run", project / "run")
    changed = project / "target" / file
    text = changed.read_text()
    assert old in text
    changed.write_text(text.replace(old, new, 1))
    recipe = json.loads((finished / "recipe.yaml").read_text())
    recipe["target"]["path"] = str(project / "target")
    (project / "recipe.yaml").write_text(json.dumps(recipe))
    run = RunDir(project / "run")
    before = contents(run)
    assert main([stage, str(project / "recipe.yaml"), "--run", str(run.root)]) == 2
    assert said in capsys.readouterr().err
    assert contents(run) == before


def test_a_conflict_with_a_later_stage_is_told_before_any_stage_begins(run, finished, capsys):
    """The features are gone, and would take hours; the training that builds on them refuses."""
    shutil.rmtree(run.features)
    before = contents(run)
    assert go("run", run, finished, "train.gamma=3") == 2
    told = capsys.readouterr()
    assert "train.gamma: 7.0 -> 3.0" in told.err
    assert "--allow-change train.gamma" in told.err
    assert "== prepare" not in told.out
    assert contents(run) == before


def test_a_run_whose_shards_are_set_aside_ends_with_1_and_tries_them_again(tmp_path, capsys):
    """Not with 2, as if it were impossible: whoever restarts a service may try once more."""
    recipe = tiny_project(tmp_path)
    _answer_with_a_token_that_breaks(tmp_path)
    command = ["run", str(recipe), "--run", str(tmp_path / "run")]
    command += ["--set", "regenerate.enabled=false"]
    for _ in range(2):
        assert main(command) == 1
        shown = capsys.readouterr().out
        assert "not finite" in shown
        assert "not done: train, score: not begun, because extract has parts not done." in shown
        assert "== train" not in shown
    command += ["--set", "extract.allow_quarantined=1"]
    assert main(command) == 1, "they are allowed to be missing, and still missing"
    assert "== score" in capsys.readouterr().out
    assert main(command) == 0


def _answer_with_a_token_that_breaks(root: Path) -> None:
    """Answers in the data, the last one of them with a token whose state is not finite."""
    answers = [*(f"answer {n}" for n in range(15)), "Z"]
    rows = [
        {"messages": [{"role": "user", "content": f"question {n}"},
                      {"role": "assistant", "content": answer}]}
        for n, answer in enumerate(answers)
    ]  # fmt: skip
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = root / "target" / "model.safetensors"
    weights = load_file(path)
    tokenizer = AutoTokenizer.from_pretrained(root / "target")
    (token,) = tokenizer.encode("Z", add_special_tokens=False)
    weights["model.embed_tokens.weight"][token] = float("inf")
    save_file(weights, path, metadata={"format": "pt"})


SUPERVISOR = """
import sys
from paceline.cli.main import main
if __name__ == "__main__":
    code = main(sys.argv[1:])
    heavy = sorted({"torch", "transformers", "tokenizers"} & sys.modules.keys())
    sys.exit(f"imported {heavy}" if heavy else code)
"""


def test_a_process_that_only_supervises_loads_none_of_what_its_workers_load(run, finished):
    """Hundreds of megabytes, for days: the files that `prepare` read are compared by digests."""
    shutil.rmtree(run.features)
    script = run.root.parent / "supervisor.py"
    script.write_text(SUPERVISOR)
    done = subprocess.run(
        [
            *(sys.executable, str(script), "extract", str(finished / "recipe.yaml")),
            *("--run", str(run.root), "--set", "extract.isolate=true"),
        ],
        env={**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "16 new, 0 errors" in done.stdout
