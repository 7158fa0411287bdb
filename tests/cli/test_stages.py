import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from fixtures_chatml import save_tokenizer
from paceline.cli.main import main
from paceline.durable.errors import UserError
from paceline.durable.owner import owned
from paceline.pipeline import STAGES, run_stage
from paceline.recipe.fingerprint import flatten
from paceline.recipe.load import load_recipe
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.stage import Report, StageRecord
from paceline.recipe.write import adopt_recipe
from paceline.watch.words import duration
from tiny_models import tiny_config


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = save_tokenizer(tmp_path_factory.mktemp("target"))
    tiny_config("llama", eos_token_id=1).save_pretrained(folder)
    return folder


@pytest.fixture
def project(tmp_path, monkeypatch, tokenizer_folder) -> Path:
    """A folder with a target, data and a recipe that names them relatively."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tokenizer_folder, tmp_path / "target")
    rows = [
        {"messages": [{"role": "user", "content": f"question {n}"},
                      {"role": "assistant", "content": f"answer {n}"}]}
        for n in range(40)
    ]  # fmt: skip
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(
        "name: demo\ntarget: {path: target}\n"
        "corpus: {sources: [{path: data.jsonl}], validation_fraction: 0.2}\n"
    )
    return tmp_path


def small_stage(name: str, recipe: Recipe, run_dir: RunDir) -> Report:
    """A stage with a real record and real files, and no model: fields are its recipe's section."""
    section = {"prepare": "corpus"}.get(name, name)
    record = StageRecord(run_dir.root / name, name, flatten(getattr(recipe, section)))
    if record.is_done():
        return Report(stage=name, skipped=True)
    adopt_recipe(recipe, run_dir)
    record.begin()
    output = run_dir.root / name / "output"
    output.write_text(name)
    record.finish([output], {})
    return Report(stage=name, lines=(f"{name} did its work [1, 2].",))


@pytest.fixture
def small_stages(monkeypatch):
    monkeypatch.setattr("paceline.cli.stages.run_stage", small_stage)


def test_prepare_runs_for_real_and_once(project, capsys):
    assert main(["prepare", "recipe.yaml"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("== prepare\n")
    prepared = RunDir(project / "runs" / "demo").prepared
    written = prepared.stat().st_mtime_ns
    assert main(["prepare", "recipe.yaml"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert prepared.stat().st_mtime_ns == written


def test_prepare_can_show_a_sample_with_its_mask(project, capsys):
    arguments = ["prepare", "recipe.yaml", "--preview", "--run"]
    assert main([*arguments, "bare"]) == 0
    shown = capsys.readouterr().out
    assert "<|im_start|>user\nquestion " in shown
    assert "⟦" not in shown
    assert shown.endswith("the answers come with `paceline regenerate`.\n")

    assert main([*arguments, "here", "--set", "regenerate.enabled=false"]) == 0
    shown = capsys.readouterr().out
    assert "<|im_start|>user\nquestion " in shown
    assert "<|im_start|>assistant\n⟦answer " in shown
    assert "<|im_end|>⟧" in shown


def test_the_run_directory_keeps_the_resolved_recipe(project):
    assert main(["prepare", "recipe.yaml", "--run", "here", "--set", "train.epochs=2"]) == 0
    kept = load_recipe(project / "here" / "recipe.yaml")
    assert kept == load_recipe(project / "recipe.yaml", ["train.epochs=2"])
    assert f"path: {project}/target\n" in (project / "here" / "recipe.yaml").read_text()


def test_a_run_goes_on_with_its_own_recipe_from_any_folder(
    project, tmp_path_factory, monkeypatch, capsys
):
    assert main(["prepare", "recipe.yaml", "--run", "here"]) == 0
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert main(["prepare", "--run", str(project / "here")]) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_a_changed_recipe_is_refused_with_the_difference_and_the_old_one_stays(project, capsys):
    assert main(["prepare", "recipe.yaml", "--run", "here"]) == 0
    kept = (project / "here" / "recipe.yaml").read_bytes()
    assert main(["prepare", "recipe.yaml", "--run", "here", "--set", "corpus.seed=5"]) == 2
    assert "corpus.seed: 0 -> 5" in capsys.readouterr().err
    assert (project / "here" / "recipe.yaml").read_bytes() == kept


def test_a_change_that_no_finished_stage_minds_is_kept_after_success(project, small_stages):
    assert main(["prepare", "recipe.yaml", "--run", "here"]) == 0
    assert main(["train", "--run", "here", "--set", "train.epochs=2"]) == 0
    assert load_recipe(project / "here" / "recipe.yaml").train.epochs == 2


def test_run_does_all_stages_in_order_and_then_has_nothing_to_do(project, small_stages, capsys):
    assert main(["run", "recipe.yaml"]) == 0
    shown = capsys.readouterr().out
    names = [name for name, _ in STAGES]
    assert [line for line in shown.splitlines() if line.startswith("== ")] == [
        *(f"== {name}" for name in names),
        "== finished",
    ]
    assert "train did its work [1, 2].\n" in shown
    assert "note: corpus.sources: none has `split: heldout`" in shown
    assert shown.endswith("Results: runs/demo/score, on one page: runs/demo/report.html\n")

    assert main(["run", "recipe.yaml"]) == 0
    again = capsys.readouterr().out
    for name in names:
        assert f"nothing to do: {name} is complete" in again


def test_a_damaged_output_is_made_again(project, small_stages, capsys):
    assert main(["extract", "recipe.yaml"]) == 0
    (project / "runs/demo/extract/output").write_text("torn")
    assert main(["extract", "recipe.yaml"]) == 0
    assert "extract did its work" in capsys.readouterr().out.partition("== extract")[2]
    assert (project / "runs/demo/extract/output").read_text() == "extract"


@pytest.mark.parametrize("kept", [b"\xff\xfe", b"", b"name: [", b"\0" * 9])
def test_a_damaged_copy_of_the_recipe_is_replaced_by_the_one_given(project, kept):
    assert main(["prepare", "recipe.yaml", "--run", "here"]) == 0
    path = project / "here" / "recipe.yaml"
    whole = path.read_bytes()
    path.write_bytes(kept)
    assert main(["prepare", "--run", "here"]) == 2
    assert main(["prepare", "recipe.yaml", "--run", "here"]) == 0
    assert path.read_bytes() == whole


@pytest.mark.parametrize("command", ["run", *(name for name, _ in STAGES)])
def test_every_stage_command_holds_the_run_directory(project, small_stages, command, capsys):
    with owned(project / "here", "paceline extract"):
        assert main([command, "recipe.yaml", "--run", "here"]) == 2
        err = capsys.readouterr().err
        assert f"`paceline extract` is at work in this run directory: process {os.getpid()}" in err
    assert not (project / "here" / "recipe.yaml").exists()
    assert main([command, "recipe.yaml", "--run", "here"]) == 0


def test_a_full_disk_is_a_sentence_and_with_room_the_work_goes_on(project):
    """The limit on a file's size stands for the disk: the write fails half-way all the same."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "import sys; from paceline.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["prepare", "recipe.yaml", "--run", "here"]
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parents[1])},
    )
    assert ended.returncode == 1, ended.stderr
    assert "error: here/corpus/prepared.jsonl: File too large." in ended.stderr
    assert "Traceback" not in ended.stderr
    left = {path.name for path in (project / "here" / "corpus").iterdir()}
    assert left == {"prepare.stage.json"}
    assert main(arguments) == 0


def test_what_could_not_be_done_is_named_and_makes_the_exit_code_1(project, monkeypatch, capsys):
    ran = []

    def stage(name: str, recipe: Recipe, run_dir: RunDir) -> Report:
        ran.append(name)
        undone = ("unit 3 failed three times.",) if name == "extract" else ()
        return Report(stage=name, undone=undone)

    monkeypatch.setattr("paceline.cli.stages.run_stage", stage)
    assert main(["run", "recipe.yaml"]) == 1
    shown = capsys.readouterr().out
    assert "not done: extract: unit 3 failed three times.\n" in shown
    assert "== finished, with parts not done\n" in shown
    assert ran == [name for name, _ in STAGES]


def test_a_stage_that_fails_ends_the_run(project, monkeypatch, capsys):
    def stage(name: str, recipe: Recipe, run_dir: RunDir) -> Report:
        if name == "extract":
            raise UserError("no room.")
        return Report(stage=name)

    monkeypatch.setattr("paceline.cli.stages.run_stage", stage)
    assert main(["run", "recipe.yaml"]) == 2
    out, err = capsys.readouterr()
    assert err == "error: no room.\n"
    assert "== train" not in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train"], "no recipe. Give one (`paceline train recipe.yaml`)"),
        (["train", "--run", "none"], "none has no recipe.yaml yet"),
        (["train", "--run", "a b"], "`paceline train recipe.yaml --run 'a b'`."),
        (["train", "absent.yaml"], "absent.yaml: no such recipe"),
        (["train", "target"], "target: a folder, not a recipe"),
        (
            ["train", "recipe.yaml", "--run", "data.jsonl"],
            "data.jsonl: cannot be made",
        ),
        (["train", "recipe.yaml", "--set", "target.path=trget"], "Did you mean "),
        (
            ["train", "recipe.yaml", "--set", "train.epochs=0", "--set", "train.gamma=0"],
            "2 problems",
        ),
    ],
)
def test_what_is_missing_is_named(project, capsys, arguments, expected):
    assert main(arguments) == 2
    assert expected in capsys.readouterr().err
    assert not (project / "runs").exists()


def test_stages_are_real_modules_by_name():
    with pytest.raises(UserError, match=r"no stage 'trian'\. Stages: prepare, regenerate, extract"):
        run_stage("trian", Recipe(), RunDir(Path("x")))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.9, "59.9 s"),
        (60, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7800, "2 h 10 min"),
    ],
)
def test_durations_are_readable(seconds, text):
    assert duration(seconds) == text


def test_a_stage_with_nothing_to_do_leaves_the_recipe_of_the_run(project, small_stages):
    assert main(["run", "recipe.yaml", "--run", "here"]) == 0
    before = (project / "here" / "recipe.yaml").read_bytes()
    other = ["recipe.yaml", "--run", "here", "--set", "train.epochs=9"]
    assert main(["prepare", *other]) == 0
    assert main(["train", *other]) == 2
    assert (project / "here" / "recipe.yaml").read_bytes() == before
    assert main(["run", "--run", "here"]) == 0


def test_what_a_stage_began_with_is_what_the_run_goes_on_with(project, small_stages, monkeypatch):
    """However the stage ends, `--run` alone is enough."""
    assert main(["prepare", "recipe.yaml", "--run", "here"]) == 0
    with monkeypatch.context() as patched:
        patched.setattr(StageRecord, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(["train", "--run", "here", "--set", "train.epochs=9"]) == 130
    assert main(["train", "--run", "here"]) == 0
    assert load_recipe(project / "here" / "recipe.yaml").train.epochs == 9


def test_an_edited_recipe_of_a_run_is_refused_with_a_way_out(project, small_stages, capsys):
    assert main(["run", "recipe.yaml", "--run", "here"]) == 0
    path = project / "here" / "recipe.yaml"
    path.write_text(path.read_text().replace("epochs: 6.0", "epochs: 7.0"))
    assert main(["run", "--run", "here"]) == 1
    assert "damaged, or edited by hand" in capsys.readouterr().err
    (project / "copy.yaml").write_text("\n".join(path.read_text().splitlines()[2:]))
    assert main(["run", "copy.yaml", "--run", "here"]) == 2, "train was made with 6 epochs"
    assert main(["run", "recipe.yaml", "--run", "here"]) == 0
    assert main(["run", "--run", "here"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "recipe.yaml", "--resume-from", ""], "--resume-from: empty"),
        (
            ["run", "recipe.yaml", "--set", "train.device=cuda:63"],
            "train.device: cuda:63 is not there",
        ),
        (["train", "recipe.yaml", "--set", "train.device=cuda:63"], "train.device: cuda:63"),
        (["score", "recipe.yaml", "--set", "target.device=cuda:63"], "target.device: cuda:63"),
        (
            ["run", "recipe.yaml", "--set", "drafter.draft_vocab=99999999"],
            "drafter.draft_vocab: 99999999 is more than the target's ",
        ),
        (
            ["run", "recipe.yaml", "--set", "drafter.layer_types=[window]"],
            "expected a list, each item full or sliding, or null",
        ),
    ],
)
def test_what_is_impossible_is_said_before_any_stage(project, capsys, arguments, said):
    assert main([*arguments, "--run", "new"]) == 2
    assert said in capsys.readouterr().err
    assert not (project / "new").exists()


@pytest.mark.parametrize("command", [["status", "here"], ["prepare", "recipe.yaml"], ["--help"]])
def test_closed_streams_are_no_fault(project, command):
    source = str(Path(paceline.__file__).parents[1])
    ended = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -m paceline "$@" >&- 2>&-', "-", *command],
        env={**os.environ, "PYTHONPATH": source},
        check=False,
    )
    assert ended.returncode == (2 if command[0] == "status" else 0)


def test_a_file_where_a_stage_s_folder_belongs_is_named(project, capsys):
    assert main(["prepare", "recipe.yaml", "--run", "here"]) == 0
    shutil.rmtree(project / "here" / "corpus")
    (project / "here" / "corpus").write_text("in the way")
    assert main(["prepare", "--run", "here"]) == 1
    said = capsys.readouterr().err
    assert "here/corpus" in said
    assert "move it away" in said
