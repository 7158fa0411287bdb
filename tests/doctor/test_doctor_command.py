"""`paceline doctor` as a whole: one line a finding, the worst first, JSON, exit codes, no hang."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from doctor_worlds import world_of
from paceline.cli.main import main
from paceline.doctor.examine import CHECKS, Check, examine
from paceline.doctor.findings import Diagnosis, Finder, Severity
from paceline.recipe.run_dir import RunDir
from tiny_run import tiny_project

FIND = Finder("x")
ERROR = FIND.error("what", "why", "mend")
WARNING = FIND.warning("what", "why", "mend")
NOTE = FIND.note("what")
OK = FIND.ok("what")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    # What Transformers loads at first use, a cold start pays for.
    from transformers import AutoTokenizer  # noqa: F401

    return tiny_project(tmp_path_factory.mktemp("doctor"))


def doctor(*arguments):
    return main(["doctor", *map(str, arguments)])


def files(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_the_tiny_recipe_has_no_errors_and_is_looked_at_in_three_seconds(project, capsys):
    before = files(project.parent)
    took = []
    while not took or (min(took) > 3 and len(took) < 3):
        started = time.monotonic()
        assert doctor(project, "--run", project.parent / "run") == 0
        took.append(time.monotonic() - started)
    assert min(took) < 3
    assert files(project.parent) == before, "a file was changed"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("0 errors, ")
    assert not [line for line in lines if line.startswith("error")]
    # One of each kind of check, where nothing is wrong and nothing was looked past.
    said = {line.split()[1] for line in lines}
    assert {"recipe:", "paths:", "gpus:", "boot:", "space:", "staging:", "store:", "vocabulary:",
            "mask", "template:", "threads:", "limits:", "memory:", "clock:"} <= said  # fmt: skip


def test_json_has_its_keys_and_the_worst_first(project, capsys):
    run = project.parent / "run"
    asked = [project, "--run", run, "--json", "--set", "drafter.mask_token_id=257"]
    assert doctor(*asked) == 1
    told = json.loads(capsys.readouterr().out)
    assert list(told) == [
        "schema_version", "recipe", "run", "seconds", "counts", "findings",
    ]  # fmt: skip
    assert told["schema_version"] == 1
    assert (told["recipe"], told["run"]) == (str(project), str(run))
    assert list(told["counts"]) == ["error", "warning", "note", "ok"]
    assert sum(told["counts"].values()) == len(told["findings"])
    assert all(list(f) == ["check", "severity", "what", "why", "mend"] for f in told["findings"])
    order = [list(Severity).index(f["severity"]) for f in told["findings"]]
    assert order == sorted(order)
    assert told["findings"][0]["check"] == "mask token"
    assert all(f["why"] and f["mend"] for f in told["findings"] if f["severity"] in
               ("error", "warning"))  # fmt: skip


@pytest.mark.parametrize(
    ("findings", "code", "strict"),
    [([], 0, 0), ([OK, NOTE], 0, 0), ([WARNING, OK], 0, 1), ([OK, ERROR], 1, 1)],
)
def test_exit_codes(findings, code, strict):
    diagnosis = Diagnosis.of(findings, recipe="", run="", seconds=0.0)
    assert (diagnosis.exit_code(), diagnosis.exit_code(strict=True)) == (code, strict)


def test_strict_makes_warnings_count(project, monkeypatch, capsys):
    for findings, code in (([WARNING], 1), ([NOTE], 0)):
        monkeypatch.setattr("paceline.doctor.examine.examine", lambda world, f=findings: f)
        assert doctor(project, "--strict") == code
        assert doctor(project) == 0


def test_a_finding_is_one_line_with_what_why_and_the_command(project, monkeypatch, capsys):
    finding = FIND.error("one\ntwo.", "it matters", "do this")
    monkeypatch.setattr("paceline.doctor.examine.examine", lambda world: [OK, finding])
    assert doctor(project) == 1
    assert capsys.readouterr().out.splitlines()[:2] == [
        "error    x: one two. It matters. Mend: do this",
        "ok       x: what.",
    ]


def test_a_recipe_that_never_answers_is_a_finding(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("paceline.cli.doctor._SECONDS", 0.5)
    os.mkfifo(tmp_path / "recipe.yaml")
    assert doctor(tmp_path / "recipe.yaml") == 1
    assert f"recipe: {tmp_path / 'recipe.yaml'} does not answer" in capsys.readouterr().out


def test_an_impossible_recipe_is_told_with_everything_else(project, capsys):
    asked = ["--set", "train.batch_samples=0", "--set", "drafter.block_size=128"]
    assert doctor(project, "--run", project.parent / "run", *asked) == 1
    out = capsys.readouterr().out
    assert "error    recipe: train.batch_samples: 0 is impossible" in out
    assert "error    recipe: drafter.block_size: 128 does not fit" in out
    assert "\nok       vocabulary: " in out


def test_a_recipe_that_is_none_and_a_run_without_one_exit_with_2(tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text("train: {lerning_rate: 1}\n")
    assert doctor(tmp_path / "bad.yaml") == 2
    assert "Did you mean train.learning_rate?" in capsys.readouterr().err
    assert doctor() == 2
    assert doctor("--run", tmp_path / "none") == 2


def test_a_run_alone_is_enough(project, tmp_path, capsys):
    from paceline.recipe.load import load_recipe
    from paceline.recipe.write import adopt_recipe

    run = RunDir(tmp_path / "run")
    adopt_recipe(load_recipe(project), run)
    assert doctor("--run", run.root) == 0
    assert f"run directory ({run.root})" in capsys.readouterr().out


def test_a_check_that_hangs_or_fails_hides_no_other(project):
    release = threading.Event()

    def hangs(world):
        release.wait(30)
        yield OK

    def fails(world):
        raise ZeroDivisionError("x")

    started = time.monotonic()
    found = examine(
        world_of(project, seconds=0.5),
        [Check("hangs", hangs), Check("fails", fails), Check("works", lambda world: [OK])],
    )
    assert time.monotonic() - started < 3
    release.set()
    assert [f.severity for f in found] == ["warning", "error", "ok"]
    assert found[0].what == "gave no answer within 0.5 s"
    assert "ZeroDivisionError: x" in found[1].what


def test_checks_that_load_libraries_follow_each_other(project):
    active = []

    def heavy(world):
        active.append(1)
        assert len(active) == 1
        time.sleep(0.05)
        active.pop()
        yield OK

    found = examine(world_of(project), [Check("x", heavy, is_heavy=True)] * 4)
    assert [f.severity for f in found] == ["ok"] * 4


def test_every_check_says_something_of_the_tiny_run(project):
    world = world_of(project)
    for check in CHECKS:
        found = list(check.look(world))
        assert found or check.name == "gpus", check.name
        assert all(f.what and f.severity in Severity for f in found)


def test_the_commands_of_this_machine_are_asked_for_within_their_limits(project):
    """The real `/`: whatever is found, nothing hangs and nothing fails."""
    found = examine(world_of(project, root=Path("/")))
    assert not [f for f in found if "the check itself failed" in f.what]
