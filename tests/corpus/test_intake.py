import json
import random
import time
from collections import Counter
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures_chatml import THINKING, byte_chatml, merging_chatml, turns
from fixtures_corpus import quarantine_of, recipe_of, samples_of, write_jsonl
from paceline.corpus import intake, row_worker, stage
from paceline.corpus.intake import Intake
from paceline.corpus.mask import Renderer
from paceline.durable.errors import TargetError
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import SourceRecipe


def noisy_rows(count: int, seed: int = 0) -> list:
    """Conversations of all sorts, rows that are rejected for all sorts of reasons, blank lines."""
    rng = random.Random(seed)
    rows: list = []
    for i in range(count):
        text = f"u:question {i}|a:answer {i}"
        rows += [
            {"messages": turns(text)},
            {"messages": turns(f"{text}|u:and {i}?|a:more of {i}")},
            {"prompt": f"only asked {i}"},
            {"messages": turns(f"a:hello|{text}")},
            {"text": f"a text of its own, number {i}"},
            {"input_ids": [i % 50, 3, 4], "loss_mask": [0, 1, 1]},
            {"conversations": [{"from": "robot", "value": "x"}]},
            b'{"torn": ',
            b"",
            {"messages": turns(f"u:{'long ' * 80}|a:{i}")},
        ]
    rng.shuffle(rows)
    return rows


@pytest.mark.parametrize("regenerate", [False, True])
def test_the_output_is_the_same_for_any_number_of_processes(tmp_path, regenerate):
    data = write_jsonl(tmp_path / "data.jsonl", noisy_rows(40))
    bench = write_jsonl(tmp_path / "bench.jsonl", noisy_rows(4, seed=1))
    recipe = recipe_of(
        tmp_path, SourceRecipe(path=str(data), weight=1.0),
        SourceRecipe(path=str(bench), split="heldout"),
        tokenizer=byte_chatml(THINKING), regenerate=regenerate, validation_fraction=0.2,
        max_length=300,
    )  # fmt: skip
    made = []
    for workers in (1, 3) if regenerate else (1, 2):
        run_dir = RunDir(tmp_path / f"run{workers}")
        report = stage.run(replace(recipe, corpus=replace(recipe.corpus, workers=workers)), run_dir)
        files = [run_dir.prepared.read_bytes(), stage.quarantine_path(run_dir).read_bytes()]
        made.append((files, report.numbers))
    assert made[0] == made[1]
    assert len(set(made[0][1]["reasons"])) >= 4
    # The number of processes says nothing of the corpus.
    again = stage.run(
        replace(recipe, corpus=replace(recipe.corpus, workers=2)), RunDir(tmp_path / "run1")
    )
    assert again.skipped


def test_large_data_are_shared_by_processes_and_small_ones_are_not(tmp_path, monkeypatch):
    data = write_jsonl(tmp_path / "data.jsonl", noisy_rows(10))
    asked = []
    real = intake.map_stream

    def noted(*args, workers, **kwargs):
        asked.append(workers)
        return real(*args, workers=workers, **kwargs)

    monkeypatch.setattr(intake, "map_stream", noted)
    monkeypatch.setattr(intake, "_cores", lambda: 2)
    stage.run(recipe_of(tmp_path, data), RunDir(tmp_path / "small"))
    monkeypatch.setattr(intake, "_WORTH_A_PROCESS", 1000)
    stage.run(recipe_of(tmp_path, data), RunDir(tmp_path / "large"))
    assert asked == [1, 2]
    prepared = [RunDir(tmp_path / name).prepared.read_bytes() for name in ("small", "large")]
    assert prepared[0] == prepared[1]


def test_what_a_process_cannot_do_ends_the_stage_with_its_reason(tmp_path):
    data = write_jsonl(tmp_path / "data.jsonl", noisy_rows(10))
    recipe = recipe_of(tmp_path, data, workers=2)
    for path in (tmp_path / "target").glob("tokenizer*.json"):
        path.unlink()
    passed = Intake(recipe)
    with pytest.raises(TargetError, match="no tokenizer in this folder"):
        passed.write(tmp_path / "prepared.jsonl", tmp_path / "quarantine.jsonl", lambda _: None)
    assert not (tmp_path / "prepared.jsonl").exists()
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("make", [byte_chatml, merging_chatml])
def test_rows_of_40_000_tokens_do_not_hang_it(tmp_path, make):
    words = " ".join(f"word{i}\n" for i in range(4_500))
    many = [
        turn for i in range(500) for turn in turns(f"u:question {i} {'x' * 30}|a:{i} {'y' * 20}")
    ]
    rows = [{"messages": turns(f"u:go|a:{words}")}, {"messages": many}]
    data = write_jsonl(tmp_path / "data.jsonl", rows)
    recipe = recipe_of(tmp_path, data, tokenizer=make(), max_length=100_000)
    started = time.process_time()
    stage.run(recipe, RunDir(tmp_path / "run"))
    assert time.process_time() - started < 30
    long, talk = samples_of(RunDir(tmp_path / "run"))
    assert min(len(long.input_ids), len(talk.input_ids)) > 40_000
    assert len(talk.loss_spans) == 500


TOKENIZERS = {"plain": byte_chatml(), "thinking": byte_chatml(THINKING)}
RENDERERS = {name: Renderer.of(tokenizer, {}) for name, tokenizer in TOKENIZERS.items()}

conversation = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "tool", "robot", 3]),
            "content": st.sampled_from(["", "a", "bc", "<|im_end|>", None, ["x"], [{"type": "y"}]]),
        }
    ),
    max_size=5,
)
row = st.one_of(
    st.fixed_dictionaries({"messages": conversation}).map(json.dumps),
    st.sampled_from(["{}", "[]", "3", '{"prompt": "x"}', '{"text": "some text"}', "  ", ""]),
    st.builds(lambda i: json.dumps({"messages": turns(f"u:{i}|a:answer")}), st.integers(0, 3)),
    st.builds(
        lambda ids, mask: json.dumps({"input_ids": ids, "loss_mask": mask}),
        st.lists(st.integers(0, 120), max_size=4),
        st.lists(st.integers(0, 1), max_size=4),
    ),
).map(str.encode)
damage = st.one_of(
    st.just(lambda data: data),
    st.builds(lambda at: lambda data: data[: at % (len(data) + 1)], st.integers(0, 10_000)),
    st.builds(
        lambda at, byte: (
            lambda data: data[: at % (len(data) + 1)] + byte + data[at % (len(data) + 1) :]
        ),
        st.integers(0, 10_000),
        st.binary(min_size=1, max_size=3),
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pass")


@settings(max_examples=2000, deadline=None)
@given(
    lines=st.lists(row, max_size=6),
    hurt=damage,
    bom=st.booleans(),
    ending=st.sampled_from([b"\n", b"\r\n"]),
    template=st.sampled_from(["plain", "thinking"]),
    regenerate=st.booleans(),
    heldout=st.booleans(),
)
def test_property_every_row_read_is_accepted_quarantined_or_blank(
    folder, lines, hurt, bom, ending, template, regenerate, heldout
):
    data = hurt(ending.join(lines))
    path = folder / "data.jsonl"
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + data)
    sources = (SourceRecipe(path=str(path), split="heldout" if heldout else "train"),)
    recipe = recipe_of(folder, *sources, regenerate=regenerate, min_loss_tokens=1, max_length=60)
    with pytest.MonkeyPatch.context() as patch:
        # The tokenizer is loaded once, not two thousand times; all else is the real thing.
        patch.setattr(row_worker, "renderer_of", lambda _: RENDERERS[template])
        passed = Intake(recipe)
        passed.write(folder / "prepared.jsonl", folder / "quarantine.jsonl", lambda _: None)
    [tally] = passed.tally.sources
    whole = path.read_bytes()
    stands = whole.removeprefix(b"\xef\xbb\xbf")
    mark_alone = bool(whole) and not stands
    expected = stands.split(b"\n")
    expected = expected[:-1] if not expected[-1] else expected
    # A mark alone is a line without anything on it.
    assert tally.read == (len(expected) or int(mark_alone))
    assert tally.blank == sum(not line.strip() for line in expected) + int(mark_alone)
    assert tally.read == tally.accepted + tally.quarantined + tally.blank
    listed = (folder / "quarantine.jsonl").read_bytes().splitlines()
    assert len(listed) == tally.quarantined
    reasons = Counter(msgspec.json.decode(line)["reason"] for line in listed)
    assert reasons == tally.reasons
    assert not reasons["internal"]
    samples = (folder / "prepared.jsonl").read_bytes().splitlines()
    assert len(samples) == passed.tally.samples.total() == tally.samples >= tally.accepted


def test_quarantine_names_each_row_by_its_line(tmp_path):
    rows = noisy_rows(3)
    data = write_jsonl(tmp_path / "data.jsonl", rows)
    stage.run(recipe_of(tmp_path, data), RunDir(tmp_path / "run"))
    for listed in quarantine_of(RunDir(tmp_path / "run")):
        line = data.read_bytes().split(b"\n")[listed["line"] - 1]
        assert line.decode(errors="backslashreplace").strip() == listed["raw"]


def test_kinds_of_content_that_data_make_up_do_not_make_a_report_long(tmp_path):
    kinds = [f"kind_{i % 40}" for i in range(120)]
    parts = [{"messages": [{"role": "user", "content": [{"type": kind}]}]} for kind in kinds]
    data = write_jsonl(tmp_path / "data.jsonl", [{"messages": turns("u:hi|a:ok")}, *parts])
    run_dir = RunDir(tmp_path / "run")
    counts = stage.run(recipe_of(tmp_path, data), run_dir).numbers["reasons"]
    named = {f"content_kind_{i}": 3 for i in range(32)}
    assert counts == {**named, "unsupported_content": 24}
    details = [row["detail"] for row in quarantine_of(run_dir)]
    assert details == [f"turn 0: a part of kind {kind} is no text" for kind in kinds]
