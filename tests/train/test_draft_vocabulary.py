"""Training with a reduced vocabulary: chosen from counts, reported, kept through a resume."""

import json
from dataclasses import replace

import pytest
import torch

from paceline.drafter.checkpoint import load_drafter
from paceline.drafter.vocabulary import choose_vocabulary, coverage
from paceline.durable.errors import DataError, RecipeChanged, RecipeError
from paceline.features.reader import FeatureReader
from paceline.train import stage, vocabulary
from paceline.train.checkpoint import read_state
from paceline.train.evaluate import depths_at_anchors, simulated_tau
from paceline.train.vocabulary import VocabularyReport
from paceline.types.sample import Split, read_samples
from tiny_models import IM_END
from training_runs import assert_same_end, events, newest, stop_after


@pytest.fixture
def reduced_run(fresh_run, tmp_path):
    """A run whose drafter proposes `size` tokens, beside a text of its own."""

    def make(size: int, text: str | None = None, **changes):
        recipe, run_dir = fresh_run(**changes)
        paths = ()
        if text is not None:
            path = tmp_path / f"{run_dir.root.name}.txt"
            path.write_text(text)
            paths = (str(path),)
        drafter = replace(recipe.drafter, draft_vocab=size, vocab_text=paths)
        return replace(recipe, drafter=drafter), run_dir

    return make


def answers(recipe, run_dir, split: Split) -> torch.Tensor:
    counts = torch.zeros(320, dtype=torch.int64)
    for sample in read_samples(run_dir.samples(recipe)):
        if sample.split is split:
            for token in torch.tensor(sample.input_ids)[sample.loss_mask()].tolist():
                counts[token] += 1
    return counts


def best(run_dir, report):
    return load_drafter(run_dir.checkpoints / report.numbers["best"])


def test_the_commonest_tokens_of_the_answers_are_proposed(reduced_run, caplog):
    recipe, run_dir = reduced_run(100)
    report = stage.run(recipe, run_dir)
    ids = best(run_dir, report).vocabulary.ids
    train = answers(recipe, run_dir, Split.TRAIN)
    assert IM_END in ids.tolist(), "no sample of this corpus has an end token"
    others = [i for i in ids.tolist() if i != IM_END]
    left_out = [i for i in range(259) if i not in ids.tolist()]
    assert min(train[others]) >= max(train[left_out])
    found = report.numbers["draft_vocabulary"]
    assert found["size"] == len(ids) == 100
    assert found["train_tokens"] == int(train.sum())
    assert found["train_coverage"] == pytest.approx(float(train[ids].sum() / train.sum()))
    validation = answers(recipe, run_dir, Split.VALIDATION)
    assert found["validation_coverage"] == pytest.approx(
        float(validation[ids].sum() / validation.sum())
    )
    assert "text_tokens" not in found
    assert "draft vocabulary: 100 of 259 tokens, which are " in "\n".join(report.lines)
    (warning,) = [r.getMessage() for r in caplog.records if "can be proposed" in r.getMessage()]
    assert warning.startswith("only ")
    assert "below 95%" in warning
    assert not any("can be proposed" in line for line in report.lines), "said once, at the start"


def test_a_text_is_counted_too(reduced_run):
    recipe, run_dir = reduced_run(4, "zzz" * 400 + "yy" * 400)
    report = stage.run(recipe, run_dir)
    ids = best(run_dir, report).vocabulary.ids.tolist()
    assert {ord("z"), ord("y"), IM_END} < set(ids)
    found = report.numbers["draft_vocabulary"]
    assert (found["text_tokens"], found["text_coverage"]) == (2000, 1.0)
    assert "of 2,000 tokens of text" in "\n".join(report.lines)


def test_tokens_never_seen_are_warned_of_before_the_first_step(reduced_run, caplog):
    recipe, run_dir = reduced_run(259)
    with caplog.at_level("INFO"):
        report = stage.run(recipe, run_dir)
    train = answers(recipe, run_dir, Split.TRAIN)
    unseen = int((train[:259] == 0).sum())
    assert report.numbers["draft_vocabulary"]["never_seen"] == unseen
    messages = [r.getMessage() for r in caplog.records]
    said = next(i for i, m in enumerate(messages) if m.startswith(f"{unseen} ids never seen"))
    assert not [m for m in messages[:said] if m.startswith("step")]


def test_t_26_three_ids_that_no_text_has_are_warned_of():
    counts = torch.zeros(16, dtype=torch.int64)
    for token, times in {0: 10, 5: 7, 9: 7, 12: 1, 15: 3}.items():
        counts[token] = times
    vocabulary = choose_vocabulary(counts, 8, tokenizer_size=16, always=[])
    assert vocabulary.ids.tolist() == [0, 1, 2, 3, 5, 9, 12, 15]
    report = VocabularyReport(
        size=8, of=16, train=coverage(vocabulary, counts),
        validation=coverage(vocabulary, counts), text=None,
        never_seen=int((counts[vocabulary.ids] == 0).sum()),
    )  # fmt: skip
    [warning] = report.warnings()
    assert warning.startswith("3 ids never seen are in the draft vocabulary.")


def test_rows_outside_are_counted_in_each_step(reduced_run):
    recipe, run_dir = reduced_run(60)
    stage.run(recipe, run_dir)
    steps = events(run_dir, "step")
    assert all(0 < step["outside"] < step["outside_count"] for step in steps)
    outside = sum(s["outside"] for s in steps) / sum(s["outside_count"] for s in steps)
    assert outside == pytest.approx(1 - _coverage(run_dir), abs=0.1)


def _coverage(run_dir) -> float:
    record = json.loads((run_dir.checkpoints / "train.stage.json").read_text())
    return record["report"]["draft_vocabulary"]["train_coverage"]


def test_the_evaluation_is_that_of_the_saved_drafter(reduced_run, world):
    recipe, run_dir = reduced_run(60)
    report = stage.run(recipe, run_dir)
    folder = run_dir.checkpoints / report.numbers["best"]
    drafter = load_drafter(folder)
    reader = FeatureReader(run_dir.features)
    splits = {s.sample_id: s.split for s in read_samples(run_dir.samples(recipe))}
    validation = [i for i, n in enumerate(reader.sample_ids) if splits[n] is Split.VALIDATION]
    tau = simulated_tau(
        depths_at_anchors(
            drafter, drafter.narrowed(world[2].head), reader, validation, anchors=32, seed=0
        )
    )
    assert tau == read_state(folder).tau


def test_stopped_and_resumed_equals_uninterrupted(reduced_run, monkeypatch, caplog):
    text = "some text to count " * 20
    recipe, straight = reduced_run(60, text)
    first = stage.run(recipe, straight)
    _, stopped = reduced_run(60, text)
    give_back = stop_after(monkeypatch, 4)
    with pytest.raises(BaseException, match="The same command goes on"):
        stage.run(recipe, stopped)
    give_back()
    kept = stopped.checkpoints / "text_counts.json"
    stamp = kept.stat().st_mtime_ns
    monkeypatch.setattr(vocabulary, "count_texts", None)  # what was counted is not counted again
    second = stage.run(recipe, stopped)
    assert kept.stat().st_mtime_ns == stamp
    assert second.numbers["draft_vocabulary"] == first.numbers["draft_vocabulary"]
    assert_same_end(straight, stopped)


def test_damaged_counts_are_counted_again(reduced_run, monkeypatch, caplog):
    recipe, run_dir = reduced_run(60, "some text")
    stop = stop_after(monkeypatch, 2)
    with pytest.raises(BaseException, match="The same command goes on"):
        stage.run(recipe, run_dir)
    stop()
    kept = run_dir.checkpoints / "text_counts.json"
    whole = kept.read_bytes()
    kept.write_bytes(whole.replace(b"[0,0,", b"[9,9,", 1))
    assert kept.read_bytes() != whole
    report = stage.run(recipe, run_dir)
    assert "counted again" in caplog.text
    assert kept.read_bytes() == whole
    assert report.numbers["draft_vocabulary"]["text_tokens"] == len("some text")


def test_another_text_is_another_training(reduced_run, tmp_path):
    recipe, run_dir = reduced_run(60, "some text")
    stage.run(recipe, run_dir)
    path = recipe.drafter.vocab_text[0]
    moved = tmp_path / "moved.txt"
    moved.write_text("some text")
    elsewhere = replace(recipe, drafter=replace(recipe.drafter, vocab_text=(str(moved),)))
    assert stage.run(elsewhere, run_dir).skipped, "its content counts, not where it lies"
    with open(path, "a") as file:  # noqa: PTH123
        file.write(" and more")
    with pytest.raises(RecipeChanged, match=r"vocab_text\.0\.content \(the data file itself"):
        stage.run(recipe, run_dir)
    smaller = replace(recipe, drafter=replace(elsewhere.drafter, draft_vocab=61))
    with pytest.raises(RecipeChanged, match=r"drafter\.draft_vocab: 60 -> 61"):
        stage.run(smaller, run_dir)


def test_more_tokens_than_there_are_is_refused(reduced_run):
    recipe, run_dir = reduced_run(260)
    with pytest.raises(RecipeError, match=r"260 tokens are asked for, .* has 259"):
        stage.run(recipe, run_dir)


def test_a_bad_row_is_named_before_the_first_step(reduced_run, tmp_path):
    recipe, run_dir = reduced_run(60)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n{"nothing": 1}\n')
    recipe = replace(recipe, drafter=replace(recipe.drafter, vocab_text=(str(rows),)))
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: no `text`"):
        stage.run(recipe, run_dir)
    assert not list(run_dir.checkpoints.glob("step_*"))


def test_a_whole_vocabulary_says_nothing_of_it(fresh_run):
    recipe, run_dir = fresh_run()
    report = stage.run(recipe, run_dir)
    assert "draft_vocabulary" not in report.numbers
    assert newest(run_dir).is_dir()
    assert {e["outside"] for e in events(run_dir, "step")} == {0.0}
