"""Paths that do not answer, cannot be written, or will not outlive the next boot."""

import os
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from doctor_worlds import lasting, only, world_of
from paceline.doctor.checks import paths
from paceline.doctor.examine import Check, examine
from paceline.doctor.touch import touch
from paceline.durable.space import Mount, mount_of
from tiny_run import tiny_project


@pytest.fixture
def recipe(tmp_path):
    return tiny_project(tmp_path)


@pytest.fixture
def apart(monkeypatch):
    """The folders of tests are temporary ones; here they count as others."""
    monkeypatch.setattr(paths, "_TEMPORARY", ("/run",))
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/nowhere")


@contextmanager
def mounted(point: Path, *options: str):
    point.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join(["size=4m", *options]), "none", str(point)]
    try:
        done = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        done = False
    if not done:
        pytest.skip("mounting needs root")
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


def check(recipe, *overrides, **given):
    return list(paths.check(world_of(recipe, *overrides, **given)))


def test_a_lasting_disk_is_fine_and_said_to_be(recipe, apart):
    [found] = check(recipe)
    assert found.severity == "ok"
    assert "run directory (" in found.what
    assert "target.path (" in found.what


def test_incident_the_script_lived_in_a_temporary_folder(recipe, monkeypatch):
    monkeypatch.setattr(paths, "_TEMPORARY", ("/run",))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(recipe.parent))
    root = recipe.parent
    [found] = only(check(recipe), "warning")
    assert found.what == (
        f"recipe ({recipe}), run directory ({root}/run), target.path ({root}/target), corpus "
        f"source train ({root}/train.jsonl), corpus source held ({root}/held.jsonl) lie in a "
        f"temporary folder ({root})"
    )
    assert found.mend == (
        f"cp -a {recipe} {root}/target {root}/train.jsonl {root}/held.jsonl /a/lasting/folder/ "
        "and name them in the recipe; --run /a/lasting/folder/run"
    )


def test_a_store_in_another_temporary_folder_is_a_finding_of_its_own(recipe, monkeypatch, tmp_path):
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(paths, "_TEMPORARY", (str(tmp_path / "other"),))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(recipe.parent / "target"))
    found = only(check(recipe, f"extract.store={tmp_path / 'other'}"), "warning")
    assert [f.what.partition(" (")[0] for f in found] == ["target.path", "extract.store"]
    assert found[1].mend == "--set extract.store=/a/lasting/folder"


def test_a_target_on_a_real_tmpfs_is_a_warning_about_memory(recipe, apart, tmp_path):
    with mounted(tmp_path / "memory") as memory:
        (recipe.parent / "target").rename(tmp_path / "kept")
        (memory / "config.json").write_text("{}")
        found = check(recipe, f"target.path={memory}", mounts=mount_of)
        [warning] = [f for f in found if f.what.startswith("target.path")]
    assert warning.severity == "warning"
    assert warning.what.endswith(f"lies in memory (tmpfs at {memory})")
    assert "takes memory that workers and staging could use" in warning.why


def test_staging_in_memory_is_as_it_should_be(recipe, apart):
    def mounts(path):
        return Mount("shm", Path("/dev/shm"), "tmpfs") if "shm" in str(path) else lasting(path)

    lasting_ones, staging = check(recipe, "extract.store=s3://bucket/x", mounts=mounts)
    assert lasting_ones.severity == staging.severity == "ok"
    assert "/dev/shm" not in lasting_ones.what, "memory is no lasting storage"
    assert staging.what == (
        "may be written, and need not outlive a boot: extract.staging (/dev/shm)"
    )


def test_a_containers_own_layer_is_a_warning(recipe, apart):
    found = check(recipe, mounts=lambda path: Mount("overlay", Path("/"), "overlay"))
    warnings = only(found, "warning")
    [warning] = warnings
    assert "gone with the container" in warning.why
    assert warning.mend.startswith("mount a folder of the machine into the container; cp -a ")


def test_a_volume_that_is_an_overlay_elsewhere_is_none(recipe, apart):
    found = check(recipe, mounts=lambda path: Mount("overlay", recipe.parent, "overlay"))
    assert [f.severity for f in found] == ["ok"]


def test_a_read_only_mount_is_an_error(recipe, apart, tmp_path):
    with mounted(tmp_path / "ro", "ro") as point:
        [error] = only(check(recipe, run=point / "run"), "error")
    assert error.what == f"run directory: {point} is mounted read-only"
    assert error.mend == f"sudo mount -o remount,rw {point}"


def test_a_folder_of_another_user_is_an_error(recipe, apart, monkeypatch):
    world = world_of(recipe)
    answer = world.answers[world.run_dir.root]
    changed = {**world.answers, world.run_dir.root: vars_of(answer, is_writable=False)}
    found = list(paths.check(type(world)(**{**vars(world), "answers": changed})))
    [error] = only(found, "error")
    assert "cannot be written by this user" in error.what
    assert error.mend == f'sudo install -d -o "$USER" {world.run_dir.root}'


def vars_of(answer, **changes):
    return type(answer)(**{**vars(answer), **changes})


def test_a_file_where_the_run_directory_should_be_is_an_error(recipe, apart):
    (recipe.parent / "run").write_text("x")
    [error] = only(check(recipe), "error")
    assert "is a file, and a folder is needed" in error.what


def test_what_is_missing_is_named_as_the_commands_would_refuse_it(recipe, apart):
    (recipe.parent / "train.jsonl").rename(recipe.parent / "tarin.jsonl")
    [error] = only(check(recipe), "error")
    assert error.what.startswith("corpus.sources.0.path:")
    assert "Did you mean" in error.what


def test_data_that_prepare_has_read_is_no_longer_needed(recipe, apart):
    from paceline.pipeline import run_stage
    from paceline.recipe.load import load_recipe
    from paceline.recipe.run_dir import RunDir

    run_stage("prepare", load_recipe(recipe), RunDir(recipe.parent / "run"))
    (recipe.parent / "train.jsonl").unlink()
    assert [f.severity for f in check(recipe)] == ["ok"]


def test_a_path_that_never_answers_is_a_finding_within_the_limit(recipe, apart):
    """A FIFO that nobody writes to: opening it neither fails nor returns."""
    (recipe.parent / "train.jsonl").unlink()
    os.mkfifo(recipe.parent / "train.jsonl")
    started = time.monotonic()
    world = world_of(recipe, seconds=1.0)
    [error] = only(paths.check(world), "error")
    skipped = examine(
        world, [Check("template", lambda world: pytest.fail("looked"), ("corpus source",))]
    )
    assert time.monotonic() - started < 3
    assert error.what.endswith(f"{recipe.parent / 'train.jsonl'} does not answer")
    assert [f.what for f in skipped] == [
        f"not looked at: corpus source train {recipe.parent / 'train.jsonl'} does not answer"
    ]


def test_the_processes_that_touched_it_are_gone(recipe):
    fifo = recipe.parent / "fifo"
    os.mkfifo(fifo)
    answers = touch([fifo, recipe], 0.5)
    assert answers[fifo].kind == "silent"
    assert answers[recipe].kind == "file"
    listed = subprocess.run(["ps", "ax", "-o", "args"], capture_output=True, text=True, check=True)
    assert str(fifo) not in listed.stdout


def test_many_paths_are_asked_and_each_gets_its_own_answer(tmp_path):
    names = [tmp_path / f"{n}.txt" for n in range(80)]
    for path in names[::2]:
        path.write_text("x")
    answers = touch(names, 10.0)
    assert [answers[path].kind for path in names] == ["file", "none"] * 40
    assert all(answers[path].at == str(tmp_path) for path in names[1::2])


def test_what_cannot_be_read_is_said_in_the_systems_words(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    answer = touch([loop], 10.0)[loop]
    assert answer.error == "Too many levels of symbolic links"
