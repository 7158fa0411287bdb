import json
import multiprocessing
import shutil
import time
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import regenerate_world
from paceline.corpus.groups import plan_groups, read_prompts
from paceline.corpus.loops import is_loop
from paceline.corpus.regenerate import quarantine_path, run
from paceline.decode.generate import generate
from paceline.decode.sampling import Sampling
from paceline.durable.errors import DataError, RecipeChanged
from paceline.recipe.run_dir import RunDir
from paceline.target.load import load_target
from paceline.types import Split
from paceline.types.sample import encode_sample, read_samples
from regenerate_world import (
    ENDS,
    make_looping_target,
    make_prepared,
    make_recipe,
    make_target,
    with_workers,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture
def run_dir(tmp_path: Path, target: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    make_prepared(made, target)
    return made


def _quarantine(run_dir: RunDir) -> list[dict]:
    return [json.loads(line) for line in quarantine_path(run_dir).read_text().splitlines()]


def _events(run_dir: RunDir) -> list[dict]:
    lines = (run_dir.events / "regenerate.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_every_prompt_is_answered_in_order_and_heldout_passes_through(run_dir, target):
    prompts = list(read_samples(run_dir.prepared))
    report = run(make_recipe(target), run_dir)
    got = list(read_samples(run_dir.regenerated))
    left_out = {row["prompt_id"]: row for row in _quarantine(run_dir)}
    kept = [p for p in prompts if p.prompt_id not in left_out]
    assert [s.prompt_id for s in got] == [p.prompt_id for p in kept]
    for prompt, sample in zip(kept, got, strict=True):
        assert (sample.split, sample.source) == (prompt.split, prompt.source)
        if prompt.split is Split.HELDOUT:
            assert encode_sample(sample) == encode_sample(prompt)
            continue
        start = len(prompt.input_ids)
        assert sample.input_ids[:start] == prompt.input_ids
        assert sample.loss_spans == [(start, len(sample.input_ids))]
        assert sample.finish == ("stop" if sample.input_ids[-1] in ENDS else "length")
        assert sample.messages[:-1] == prompt.messages
        assert not ENDS & set(sample.input_ids[start:-1])
    numbers = report.numbers
    assert numbers["prepared"] == len(prompts) == 26
    assert numbers["heldout"] == 5
    assert numbers["answered"] + numbers["quarantined"] + numbers["heldout"] == 26
    assert numbers["quarantined"] == len(left_out)
    assert numbers["finish"]["stop"] > 0
    assert numbers["finish"]["length"] > 0
    answers = [s.num_loss_tokens for s in got] + [len(r["answer_ids"]) for r in left_out.values()]
    assert numbers["tokens"] == numbers["generated_tokens"] == sum(answers)
    assert any("26 prompts" in line for line in report.lines)
    trained = [s for s in got if s.split is Split.TRAIN]
    assert numbers["vocabulary"]["tokens"] == sum(s.num_loss_tokens for s in trained)


def test_answers_do_not_depend_on_groups_or_workers(tmp_path, target):
    """Sampled: another group size, two processes, and each prompt alone give the same corpus."""
    corpora = []
    for name, recipe in {
        "fours": make_recipe(target),
        "sevens": make_recipe(target, group_size=7),
        "parallel": with_workers(make_recipe(target), 2),
    }.items():
        run_dir = RunDir(tmp_path / name)
        make_prepared(run_dir, target)
        run(recipe, run_dir)
        corpora.append(run_dir.regenerated.read_bytes())
    assert corpora[0] == corpora[1] == corpora[2]
    recipe = make_recipe(target)
    model = load_target(recipe.target).model
    for sample in list(read_samples(run_dir.regenerated))[:6]:
        if sample.split is Split.HELDOUT:
            continue
        start = sample.loss_spans[0][0]
        [alone] = generate(
            model,
            [sample.input_ids[:start]],
            max_new_tokens=24,
            eos_ids=ENDS,
            sampling=Sampling(temperature=2.0),
            request_keys=[sample.prompt_id],
        )
        assert list(alone.ids) == sample.input_ids[start:]


@pytest.mark.parametrize("mode", ["sampled", "greedy"])
def test_t_31_a_killed_run_is_resumed_to_the_same_bytes(tmp_path, target, mode):
    """SIGKILL of a real process at random moments; only what was missing is asked again."""
    undisturbed = RunDir(tmp_path / "undisturbed")
    make_prepared(undisturbed, target, count=100)
    recipe = make_recipe(target, sampled=mode == "sampled")
    run(recipe, undisturbed)
    run_dir = RunDir(tmp_path / "killed")
    make_prepared(run_dir, target, count=100)
    random = Random(mode)
    answers = run_dir.corpus / "answers"
    context = multiprocessing.get_context("forkserver")
    # The server has the imports behind it, so a process costs milliseconds, not seconds.
    context.set_forkserver_preload(["paceline.corpus.regenerate", "paceline.target.load"])
    for kill_at in (0, 1, 2, 4):
        process = context.Process(
            target=regenerate_world.run_with_one_thread, args=(recipe, run_dir.root)
        )
        process.start()
        end = time.monotonic() + 60
        while len(list(answers.glob("*.jsonl"))) < kill_at and process.is_alive():
            assert time.monotonic() < end
            time.sleep(0.001)
        time.sleep(random.random() * (0.03 if kill_at else 1.0))
        process.kill()
        process.join()
        assert process.exitcode == -9
    assert not run_dir.regenerated.exists()
    report = run(recipe, run_dir)
    assert run_dir.regenerated.read_bytes() == undisturbed.regenerated.read_bytes()
    assert quarantine_path(run_dir).read_bytes() == quarantine_path(undisturbed).read_bytes()
    files = {path.name: path.read_bytes() for path in answers.glob("*.jsonl")}
    assert files == {p.name: p.read_bytes() for p in (undisturbed.corpus / "answers").iterdir()}
    # Every group that counted before the last kill was left alone after it.
    assert 12 <= report.numbers["reused_answers"] < 80
    kinds = [e["kind"] for e in _events(run_dir)]
    last = kinds[len(kinds) - kinds[::-1].index("start") :]
    assert last.count("progress") == 20 - report.numbers["reused_answers"] // 4


def test_twice_does_the_work_once_and_another_recipe_is_refused(run_dir, target):
    recipe = make_recipe(target)
    first = run(recipe, run_dir)
    before = {p: p.stat().st_mtime_ns for p in run_dir.corpus.rglob("*") if p.is_file()}
    again = run(recipe, run_dir)
    assert again.skipped
    assert again.numbers == first.numbers
    assert {p: p.stat().st_mtime_ns for p in run_dir.corpus.rglob("*") if p.is_file()} == before
    with pytest.raises(RecipeChanged, match=r"regenerate\.seed: 0 -> 1"):
        run(make_recipe(target, seed=1), run_dir)
    with pytest.raises(RecipeChanged, match="target"):
        run(make_recipe(make_target(run_dir.root / "other", seed=9)), run_dir)


def test_off_says_so_and_does_nothing(tmp_path, target):
    report = run(make_recipe(target, enabled=False), RunDir(tmp_path / "run"))
    assert report.skipped
    assert "off" in report.lines[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_answers_are_redone(run_dir, target, damage):
    recipe = make_recipe(target)
    run(recipe, run_dir)
    good = run_dir.regenerated.read_bytes()
    path = run_dir.corpus / "answers" / "group-00002.jsonl"
    whole = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(whole[:-20] if damage == "cut" else whole.replace(b"[", b"[1,", 1))
    run_dir.regenerated.write_bytes(good[:-1])
    report = run(recipe, run_dir)
    assert run_dir.regenerated.read_bytes() == good
    assert path.read_bytes() == whole
    assert report.numbers["reused_answers"] == 17
    (redo,) = [e for e in _events(run_dir) if e["kind"] == "redo"]
    assert (redo["name"], redo["reason"]) == ("group-00002.jsonl", "not as it was written")
    last = _events(run_dir)[-1]
    assert (last["done"], last["skipped"]) == (21, 17)
    assert last["redone"] == {"not as it was written": 1}
    assert last["tokens"] == report.numbers["tokens"], "those of earlier runs too"


def test_answers_of_another_recipe_are_never_taken_for_ones_own(run_dir, target):
    """The stage record was removed, as its error message allows; the answers stand there still."""
    run(make_recipe(target, seed=5), run_dir)
    other = run_dir.regenerated.read_bytes()
    (run_dir.corpus / "regenerate.stage.json").unlink()
    report = run(make_recipe(target), run_dir)
    assert report.numbers["reused_answers"] == 0
    assert run_dir.regenerated.read_bytes() != other


def test_t_33_answers_cut_at_the_limit_are_counted_and_kept_or_excluded(tmp_path, target):
    reports = {}
    for policy in ("keep", "exclude"):
        run_dir = RunDir(tmp_path / policy)
        make_prepared(run_dir, target, count=50)
        reports[policy] = run(make_recipe(target, on_length=policy), run_dir).numbers
    samples = list(read_samples(RunDir(tmp_path / "keep").regenerated))
    cut = sum(s.finish == "length" for s in samples)
    assert 5 < cut < 35
    for numbers in reports.values():
        assert numbers["finish"]["length"] == cut
        assert numbers["finish"]["stop"] == 40 - cut
    assert "length_cut" not in reports["keep"]["reasons"]
    assert reports["exclude"]["reasons"]["length_cut"] == cut
    rows = [r for r in _quarantine(RunDir(tmp_path / "exclude")) if r["reason"] == "length_cut"]
    assert len(rows) == cut
    assert all(len(r["answer_ids"]) == 24 and r["finish"] == "length" for r in rows)
    kept = list(read_samples(RunDir(tmp_path / "exclude").regenerated))
    assert all(s.finish == "stop" for s in kept if s.split is not Split.HELDOUT)


def test_loops_are_found_counted_and_excluded(tmp_path):
    target = make_looping_target(tmp_path / "target")
    numbers = {}
    for policy in ("keep", "exclude"):
        run_dir = RunDir(tmp_path / policy)
        make_prepared(run_dir, target)
        recipe = make_recipe(target, temperature=0.1, on_loop=policy, max_new_tokens=120)
        recipe = replace(recipe, corpus=replace(recipe.corpus, max_length=200))
        numbers[policy] = run(recipe, run_dir).numbers
    assert numbers["keep"]["loops"] == numbers["exclude"]["loops"]
    assert 2 < numbers["keep"]["loops"] < 19
    assert numbers["exclude"]["reasons"]["loop"] == numbers["exclude"]["loops"]
    rows = [r for r in _quarantine(run_dir) if r["reason"] == "loop"]
    assert all(is_loop(r["answer_ids"], 4) for r in rows)
    assert len(rows) == numbers["exclude"]["loops"]


def test_prompt_and_answer_are_cut_at_max_length(run_dir, target):
    recipe = make_recipe(target)
    recipe = replace(recipe, corpus=replace(recipe.corpus, max_length=72, min_loss_tokens=8))
    report = run(recipe, run_dir)
    samples = [s for s in read_samples(run_dir.regenerated) if s.split is not Split.HELDOUT]
    assert max(len(s.input_ids) for s in samples) == 72
    for sample in samples:
        at_limit = len(sample.input_ids) == 72 or sample.num_loss_tokens == 24
        assert sample.finish == "stop" or at_limit
    assert report.numbers["reasons"]["too_few_loss_tokens"] == len(_quarantine(run_dir)) > 0
    assert all(len(row["answer_ids"]) < 8 for row in _quarantine(run_dir))


def test_impossible_corpora_are_refused_by_name(tmp_path, run_dir, target):
    with pytest.raises(DataError, match="Run prepare first"):
        run(make_recipe(target), RunDir(tmp_path / "empty"))
    recipe = make_recipe(target)
    long = replace(recipe, corpus=replace(recipe.corpus, max_length=30))
    with pytest.raises(DataError, match="leaves no room"):
        run(long, run_dir)
    shutil.rmtree(run_dir.root)
    samples = make_prepared(run_dir, target)
    answered = replace(samples[0], loss_spans=[(3, 5)])
    run_dir.prepared.write_bytes(encode_sample(answered))
    with pytest.raises(DataError, match="has an answer already"):
        run(recipe, run_dir)


def test_nothing_left_to_train_on_is_an_error_that_leaves_the_quarantine(run_dir, target):
    recipe = make_recipe(target, on_length="exclude", max_new_tokens=1)
    with pytest.raises(DataError, match=r"No answered training sample is left.*length_cut"):
        run(recipe, run_dir)
    assert not run_dir.regenerated.exists()
    assert len(_quarantine(run_dir)) == 21
    assert _events(run_dir)[-1]["kind"] == "failed"


def test_events_carry_tokens_rate_and_time_left(run_dir, target):
    report = run(make_recipe(target), run_dir)
    progress = [e for e in _events(run_dir) if e["kind"] == "progress"]
    assert [e["done"] for e in progress] == [4, 8, 12, 16, 20, 21]
    assert progress[-1]["tokens"] == report.numbers["tokens"]
    assert progress[-1]["eta"] == 0.0
    assert all(e["rate"] > 0 and e["total"] == 21 for e in progress)
    assert [e["kind"] for e in _events(run_dir)] == ["start", *["progress"] * 6, "finished"]


@settings(max_examples=10, deadline=None)
@given(size=st.integers(1, 30), order=st.randoms(use_true_random=False))
def test_groups_are_a_function_of_the_corpus_alone(tmp_path_factory, target, size, order):
    run_dir = RunDir(tmp_path_factory.mktemp("groups") / "run")
    samples = make_prepared(run_dir, target)
    groups = plan_groups(run_dir.prepared, size)
    assert groups == plan_groups(run_dir.prepared, size)
    told = [[s.prompt_id for s in read_prompts(run_dir.prepared, g)] for g in groups]
    wanted = [s.prompt_id for s in samples if s.split is not Split.HELDOUT]
    flat = list(chain.from_iterable(told))
    assert Counter(flat) == Counter(wanted)
    assert [len(g) for g in told[:-1]] == [size] * (len(told) - 1)
    lengths = {s.prompt_id: len(s.input_ids) for s in samples}
    in_order = [lengths[p] for p in flat]
    assert in_order == sorted(in_order, reverse=True)
    order.shuffle(samples)
    run_dir.prepared.write_bytes(b"".join(encode_sample(s) for s in samples))
    shuffled = plan_groups(run_dir.prepared, size)
    assert [[s.prompt_id for s in read_prompts(run_dir.prepared, g)] for g in shuffled] == told


@given(
    piece=st.lists(st.integers(0, 1000), min_size=8, max_size=20, unique=True),
    repeats=st.integers(2, 6),
    before=st.lists(st.integers(2000, 3000), max_size=9, unique=True),
)
def test_a_piece_repeated_often_enough_is_a_loop(piece, repeats, before):
    assert is_loop(before + piece * repeats, repeats)
    assert not is_loop(before + piece * (repeats - 1), repeats)


def test_a_table_rule_is_no_loop():
    assert not is_loop([7, 8] * 12, 4)
    assert is_loop([7, 8] * 16, 4)
    assert not is_loop(list(range(200)), 2)
    assert not is_loop([], 2)
