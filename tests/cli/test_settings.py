"""What the file system refuses is told with the setting that named the path."""

import errno
import json
import os

import pytest

from paceline.cli.main import main
from paceline.cli.settings import Setting, settings_named
from paceline.durable.errors import StorageRefused, UserError, storage_refused
from tiny_run import tiny_project


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny_project(tmp_path_factory.mktemp("settings"))


def refusal(code, path, *settings):
    with pytest.raises((UserError, StorageRefused)) as caught, settings_named(settings):
        raise OSError(code, os.strerror(code), str(path))
    return caught.value


def test_each_refused_path_is_told_with_its_own_setting(tmp_path):
    run = Setting("--run DIR", tmp_path / "run", goes_on=True)
    store = Setting("extract.store", tmp_path / "run" / "store", goes_on=True)
    data = Setting("corpus.sources.0.path", tmp_path / "a.jsonl", is_written=False)
    below = refusal(errno.EACCES, store.path / "unit", run, store, data)
    assert isinstance(below, StorageRefused)
    assert "choose another place (`extract.store`). Nothing is lost" in str(below)
    assert "(`--run DIR`)" in str(refusal(errno.EROFS, run.path / "features", run, store, data))
    assert "room there, or choose another place (`--run DIR`)" in str(
        refusal(errno.ENOSPC, run.path / "features", run, store, data)
    )
    unreadable = refusal(errno.EACCES, data.path, run, store, data)
    assert isinstance(unreadable, UserError)
    assert str(unreadable) == (
        f"{data.path}: Permission denied. Give this user the right to it, or choose another place "
        "(`corpus.sources.0.path`)."
    )


def test_what_a_worker_was_refused_is_told_with_its_setting(tmp_path):
    error = OSError(errno.EACCES, "Permission denied", str(tmp_path / "store" / "unit"))
    refused = storage_refused(error)
    assert refused is not None
    assert "(`" not in str(refused)
    named = settings_named([Setting("extract.store", tmp_path / "store")])
    with pytest.raises(StorageRefused, match=r"\(`extract.store`\)"), named:
        raise refused


def test_errors_of_other_places_pass_as_they_are(tmp_path):
    setting = Setting("--run DIR", tmp_path / "run")
    for error in (
        FileNotFoundError(errno.ENOENT, "No such file", str(tmp_path / "run" / "inside")),
        PermissionError(errno.EACCES, "Permission denied", "/elsewhere"),
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        StorageRefused("no room", errno.ENOSPC),
    ):
        with pytest.raises(type(error)) as caught, settings_named([setting]):
            raise error
        assert caught.value is error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prepare", "{recipe}", "--run", "/proc/foo/x"], "Choose another place (`--run DIR`)."),
        (["init", "--target", "{root}/target", "--data", "{root}/train.jsonl", "--out",
          "/proc/foo/recipe.yaml"], "/proc/foo/recipe.yaml: cannot be made"),
        (["init", "--target", "{root}/target", "--data", "{root}/train.jsonl", "--out",
          "{root}/train.jsonl/x.yaml"], "Choose another place (`--out FILE`)."),
    ],
)  # fmt: skip
def test_a_path_that_cannot_be_made_is_the_users(recipe, capsys, arguments, said):
    names = {"recipe": recipe, "root": recipe.parent}
    assert main([argument.format(**names) for argument in arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_staging_that_cannot_be_made_is_the_users(recipe, tmp_path, s3, capsys):
    run = ["--run", str(tmp_path / "run")]
    off = ["--set", "regenerate.enabled=false"]
    answer = {"role": "assistant", "content": "yes"}
    rows = [{"messages": [{"role": "user", "content": str(n)}, answer]} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sources = ["--set", f"corpus.sources=[{{path: {tmp_path / 'rows.jsonl'}}}]"]
    assert main(["prepare", str(recipe), *run, *off, *sources]) == 0
    store = [f"extract.store={s3.url('nowhere')}", "extract.staging=/proc/st"]
    store.append(f"extract.store_options={json.dumps(dict(s3.options))}")
    with s3.credentials():
        assert main(["extract", *run, *(w for key in store for w in ("--set", key))]) == 2
    assert "error: /proc/st: cannot be made" in capsys.readouterr().err


def test_a_run_refuses_at_once_what_a_later_stage_would(recipe, tmp_path, capsys):
    (tmp_path / "text.jsonl").write_text('{"a": 1}\n')
    texts = f"drafter.vocab_text=[{tmp_path / 'text.jsonl'}]"
    for changes, said in (
        (["extract.num_taps=100"], "extract.num_taps: 100 taps do not fit"),
        (["extract.taps=[1,99]"], "extract.taps: (1, 99) go beyond the target's layers 0..5"),
        (["drafter.draft_vocab=300"], "300 is more than the target's 259 tokens"),
        (["drafter.mask_token_id=257"], "drafter.mask_token_id: 257 ends an answer"),
        (["score.max_new_tokens=508"], "leave no room for a prompt in the target's 512 positions"),
        (["drafter.draft_vocab=50", texts], "row 1: no `text`"),
        (["extract.store=s3://b", "extract.store_options.endpoint=nowhere"], "'nowhere' is not"),
    ):
        given = [word for change in changes for word in ("--set", change)]
        assert main(["run", str(recipe), "--run", str(tmp_path / "run"), *given]) == 2
        assert said in capsys.readouterr().err
    assert main(["run", str(recipe), "--run", str(tmp_path / "run"), "--resume-from", "x"]) == 2
    assert "--resume-from x: no such folder" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
