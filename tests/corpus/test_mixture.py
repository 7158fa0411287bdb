import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures_chatml import turns
from fixtures_corpus import quarantine_of, recipe_of, samples_of, write_jsonl
from paceline.corpus import stage
from paceline.corpus.estimate import estimate_samples
from paceline.corpus.mixture import Candidate, expected_sizes, left_out, mixture_key
from paceline.durable.errors import RecipeError
from paceline.recipe.check import check_recipe
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import SourceRecipe

sizes = st.lists(st.integers(1, 3), min_size=0, max_size=40)
weights = st.none() | st.floats(0.01, 100)
caps = st.none() | st.integers(1, 50)


def candidates_of(source: int, counts: list[int]) -> list[Candidate]:
    return [
        Candidate(source, mixture_key(0, bytes([source, i]) * 8), count)
        for i, count in enumerate(counts)
    ]


def taken(candidates, sources) -> dict[int, int]:
    out = left_out(candidates, sources)
    kept = Counter()
    for place, candidate in enumerate(candidates):
        if place not in out:
            kept[candidate.source] += candidate.samples
    return kept


@settings(max_examples=300, deadline=None)
@given(data=st.lists(st.tuples(sizes, weights, caps), min_size=1, max_size=4), order=st.randoms())
def test_property_caps_hold_shares_are_those_of_the_weights_and_no_order_matters(data, order):
    sources = [
        SourceRecipe(path=str(i), weight=w, max_samples=c) for i, (_, w, c) in enumerate(data)
    ]
    candidates = [c for i, (counts, _, _) in enumerate(data) for c in candidates_of(i, counts)]
    kept = taken(candidates, sources)
    shuffled = order.sample(candidates, len(candidates))
    out = left_out(candidates, sources)
    moved = left_out(shuffled, sources)
    assert {candidates[i] for i in out} == {shuffled[i] for i in moved}
    largest = 3
    for number, source in enumerate(sources):
        have = sum(c.samples for c in candidates if c.source == number)
        assert kept[number] <= min(have, source.max_samples or have)
        if source.weight is None:
            cap = have if source.max_samples is None else min(have, source.max_samples)
            assert kept[number] > cap - largest
    capped = taken(candidates, [replace(source, weight=None) for source in sources])
    weighted = [i for i, s in enumerate(sources) if s.weight is not None and capped[i]]
    for a in weighted:
        for b in weighted:
            # Whole rows are taken, and of none more than its share: each is short by less than one.
            ratio = sources[b].weight / sources[a].weight
            assert kept[b] <= (kept[a] + largest) * ratio + 1e-3


@settings(max_examples=100, deadline=None)
@given(counts=st.lists(st.just(1), min_size=5, max_size=40), cap=st.integers(1, 30))
def test_property_rows_that_are_added_displace_no_more_than_come_in(counts, cap):
    source = [SourceRecipe(path="a", max_samples=cap)]
    before = candidates_of(0, counts)
    after = [*before, *(Candidate(0, mixture_key(0, b"new" + bytes([i])), 1) for i in range(5))]
    old = {before[i] for i in range(len(before)) if i not in left_out(before, source)}
    out = left_out(after, source)
    new = {after[i] for i in range(len(after)) if i not in out}
    assert len(old - new) <= len(new - old)
    assert new - set(before) == new - old


def rows(count: int, tag: str) -> list[dict]:
    return [{"messages": turns(f"u:{tag} question {i}|a:answer {tag} {i}")} for i in range(count)]


@pytest.fixture
def mixed(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", rows(60, "a"))
    b = write_jsonl(tmp_path / "b.jsonl", rows(20, "b"))
    c = write_jsonl(tmp_path / "c.jsonl", rows(9, "c"))
    return recipe_of(
        tmp_path,
        SourceRecipe(path=str(a), weight=1.0),
        SourceRecipe(path=str(b), weight=0.5, max_samples=18),
        SourceRecipe(path=str(c)),
    )


def test_the_plan_expects_what_the_mixture_takes(mixed):
    assert expected_sizes([60, 20, 9], mixed.corpus.sources) == [36, 18, 9]
    assert expected_sizes([60, 0, 9], mixed.corpus.sources) == [60, 0, 9]
    assert estimate_samples(mixed).samples == 63


def test_every_row_is_taken_or_quarantined_with_the_reason(mixed, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    report = stage.run(mixed, run_dir)
    kept = Counter(sample.source for sample in samples_of(run_dir))
    assert kept == {"a": 36, "b": 18, "c": 9}
    reasons = Counter((row["source"], row["reason"]) for row in quarantine_of(run_dir))
    assert reasons == {("a", "over_weight"): 24, ("b", "over_max_samples"): 2}
    for name, numbers in report.numbers["sources"].items():
        assert numbers["accepted"] == numbers["samples"] == kept[name]
        assert numbers["read"] == numbers["accepted"] + numbers["quarantined"]
    assert report.numbers["samples"]["train"] == 63
    ids = {row["sample_id"] for row in quarantine_of(run_dir)}
    assert not ids & {sample.sample_id for sample in samples_of(run_dir)}
    assert all(row["raw"].startswith('{"messages"') for row in quarantine_of(run_dir))
    # In the order of the files, as without a mixture.
    numbers = [int(s.messages[0]["content"].split()[-1]) for s in samples_of(run_dir)]
    assert numbers[:36] == sorted(numbers[:36])
    assert not list(run_dir.corpus.glob("*.partial"))
    assert sorted(p.name for p in run_dir.corpus.iterdir()) == [
        "prepare.stage.json", "prepared.jsonl", "quarantine.jsonl",
    ]  # fmt: skip


def test_the_choice_depends_on_no_order_of_rows_and_on_the_seed(mixed, tmp_path):
    chosen = []
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        source = mixed.corpus.sources[0]
        lines = rows(60, "a")
        random.Random(name).shuffle(lines)
        write_jsonl(tmp_path / "a.jsonl", lines)
        recipe = replace(mixed, corpus=replace(mixed.corpus, seed=seed))
        assert recipe.corpus.sources[0] == source
        stage.run(recipe, RunDir(tmp_path / name))
        chosen.append({s.sample_id for s in samples_of(RunDir(tmp_path / name))})
    assert chosen[0] == chosen[1] != chosen[2]


def test_a_held_out_prompt_stays_out_of_training_though_it_is_not_scored(tmp_path):
    train = write_jsonl(tmp_path / "train.jsonl", rows(30, "x"))
    bench = write_jsonl(
        tmp_path / "bench.jsonl", [{"prompt": f"x question {i}"} for i in range(10)]
    )
    run_dir = RunDir(tmp_path / "run")
    heldout = SourceRecipe(path=str(bench), split="heldout", max_samples=3)
    report = stage.run(recipe_of(tmp_path, train, heldout), run_dir)
    assert report.numbers["samples"] == {"train": 20, "validation": 0, "heldout": 3}
    assert report.numbers["reasons"] == {"in_heldout": 10, "over_max_samples": 7}


def test_a_weight_of_held_out_prompts_is_refused(tmp_path):
    bench = write_jsonl(tmp_path / "bench.jsonl", rows(2, "x"))
    heldout = SourceRecipe(path=str(bench), split="heldout", weight=1.0)
    with pytest.raises(RecipeError, match=r"sources\.1\.weight: held-out prompts are not mixed"):
        check_recipe(recipe_of(tmp_path, bench, replace(heldout, name="b")))
