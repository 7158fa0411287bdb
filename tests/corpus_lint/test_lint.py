import random
import re
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from checkout import ROOT
from fixtures_chatml import END, THINKING, byte_chatml, turns
from fixtures_corpus import quarantine_of, recipe_of, samples_of
from lint_data import chats, faulty, linted, source, tokens_row
from paceline.corpus import coverage, stage
from paceline.corpus.lint.lint import lint
from paceline.corpus.lint.lowest import Lowest
from paceline.corpus.lint.measure import histogram, percentile
from paceline.corpus.lint.reasons import REASONS, words_of
from paceline.durable.errors import DataError, RecipeError, TargetError
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import SourceRecipe

OF_REGENERATE = ("answer", "groups", "regenerate")
"""Modules whose reasons are those of answers that the target gives."""


def recipe_with_faults(tmp_path, **settings):
    held = source(tmp_path, "held", [{"messages": turns("u:question 7?")}, *chats(2, 500)])
    return recipe_of(
        tmp_path,
        source(tmp_path, "faulty", faulty()),
        source(tmp_path, "good", chats(25, 100)),
        SourceRecipe(path=str(held), split="heldout"),
        max_length=400,
        validation_fraction=0.2,
        **settings,
    )


@pytest.mark.parametrize("regenerate", [False, True])
def test_counts_are_those_of_prepare(tmp_path, regenerate):
    recipe = recipe_with_faults(tmp_path, regenerate=regenerate)
    run_dir = RunDir(tmp_path / "run")
    numbers = stage.run(recipe, run_dir).numbers
    result = lint(recipe)

    assert result.tally.numbers() == {key: numbers[key] for key in result.tally.numbers()}
    assert {n: c.numbers() for n, c in result.overlap.items()} == numbers["overlap"]
    assert result.coverage.numbers() == numbers["vocabulary"]
    listed = Counter(row["reason"] for row in quarantine_of(run_dir))
    assert {reason.code: reason.count for reason in result.reasons} == listed
    assert result.prompts_only == regenerate


def test_what_is_measured_is_what_the_samples_say(tmp_path):
    recipe = recipe_with_faults(tmp_path)
    run_dir = RunDir(tmp_path / "run")
    stage.run(recipe, run_dir)
    samples = samples_of(run_dir)
    trained = [s for s in samples if s.split != "heldout"]
    measure = lint(recipe).measure

    assert measure.lengths == Counter(len(s.input_ids) for s in trained)
    spans = [(s, a, b) for s in trained for a, b in s.loss_spans]
    assert measure.answers == Counter(b - a for _, a, b in spans)
    assert measure.first_tokens == Counter(s.input_ids[a] for s, a, _ in spans)
    assert measure.prompts == Counter(s.loss_spans[0][0] for s in trained)
    end = byte_chatml().convert_tokens_to_ids(END)
    assert measure.ended == sum(s.input_ids[b - 1] == end for s, _, b in spans)
    assert measure.cut == 1
    assert measure.unended == 0
    assert measure.ended + measure.cut == measure.answers.total()
    for name in ("faulty", "good", "held"):
        mine = [s for s in samples if s.source == name]
        amount = measure.sources[name].amount
        assert amount.samples == len(mine)
        assert amount.tokens == sum(len(s.input_ids) for s in mine)
        assert amount.trained == sum(s.num_loss_tokens for s in mine)


def test_every_reason_has_rows_to_look_at(tmp_path):
    result = lint(recipe_with_faults(tmp_path))
    assert len(result.reasons) >= 13
    for reason in result.reasons:
        assert len(reason.examples) == min(3, reason.count)
        assert sum(reason.sources.values()) == reason.count
        assert all(row.reason == reason.code for row in reason.examples)


def test_each_reason_code_of_the_corpus_has_words():
    folders = [ROOT / "src/paceline" / name for name in ("corpus", "rows")]
    files = [path for folder in folders for path in folder.glob("*.py")]
    text = "\n".join(path.read_text() for path in files if path.stem not in OF_REGENERATE)
    codes = set(re.findall(r'Rejected\(\s*"([a-z0-9_]+)"', text))
    codes |= set(re.findall(r'super\(\).__init__\("([a-z0-9_]+)"', text))
    codes |= set(re.findall(r'bad_row\([^"]*"([a-z0-9_]+)"', text))
    codes |= {"over_max_samples", "over_weight"}
    assert {"no_answer", "template_rejected", "loop", "duplicate"} <= codes
    assert codes == REASONS
    assert "image url" in words_of("content_image_url").meaning
    assert words_of("of_a_later_version").meaning


def test_the_order_of_rows_changes_nothing_but_their_numbers(tmp_path):
    rows = faulty()
    results = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        shuffled = rows[:]
        random.Random(seed).shuffle(shuffled)
        results.append(linted(folder, shuffled, max_length=400))
    one, two = results
    assert one.samples == two.samples
    assert one.languages == two.languages
    assert one.measure == two.measure
    assert one.frequent_tokens == two.frequent_tokens
    for mine, other in zip(one.reasons, two.reasons, strict=True):
        assert (mine.code, mine.count) == (other.code, other.count)
        assert [row.raw for row in mine.examples] == [row.raw for row in other.examples]


def test_bare_prompts_are_looked_at_as_prompts_only_where_that_may_be(tmp_path):
    rows = [{"prompt": f"Say {i} in words"} for i in range(20)]
    recipe = recipe_of(tmp_path, source(tmp_path, "data", rows))
    strict = lint(recipe)
    assert strict.tally.accepted == 0
    assert strict.tally.reasons == {"no_answer": 20}
    result = lint(recipe, may_be_prompts=True)
    assert result.found_prompts
    assert result.prompts_only
    assert result.tally.accepted == 20
    assert result.measure.prompts.total() == 20

    mixed = recipe_of(tmp_path, source(tmp_path, "mixed", [*rows, *chats(1)]))
    assert not lint(mixed, may_be_prompts=True).found_prompts


def test_a_thinking_template_gives_more_samples_than_rows(tmp_path):
    rows = [{"messages": turns(f"u:{i}|a:<think>\nso {i}\n</think>\n\nyes|u:more|a:no")}
            for i in range(4)]  # fmt: skip
    dropping = THINKING.replace("{{ m['content'] +", "{{ (m['content'].split('</think>')[-1]) +")
    result = linted(tmp_path, rows, tokenizer=byte_chatml(dropping),
                    template_args={"enable_thinking": False})  # fmt: skip
    source_tally = result.tally.sources[0]
    assert source_tally.accepted == 4
    assert source_tally.samples == 8


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (lambda t: (t / "chat_template.jinja").unlink(), TargetError, "no chat template"),
        (lambda t: (t / "tokenizer.json").unlink(), TargetError, "no tokenizer in this folder"),
    ],
)
def test_a_target_that_cannot_be_used_is_named(tmp_path, spoil, error, words):
    recipe = recipe_of(tmp_path, source(tmp_path, "data", chats(2)))
    spoil(Path(recipe.target.path))
    with pytest.raises(error, match=words):
        lint(recipe)


def test_what_prepare_refuses_is_refused(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        lint(recipe_of(tmp_path, tmp_path / "none.jsonl"))
    with pytest.raises(RecipeError, match="set by Paceline itself"):
        linted(tmp_path, chats(1), template_args={"tools": []})


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    aside = tmp_path / "aside"
    aside.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(aside))
    linted(tmp_path, faulty())
    assert list(aside.iterdir()) == []


def test_memory_does_not_grow_with_the_text(tmp_path, monkeypatch):
    # Tokens are counted by the megabyte, which so little text never fills.
    monkeypatch.setattr(coverage, "_WAITING", 1 << 12)

    def peak(count: int) -> int:
        folder = tmp_path / str(count)
        folder.mkdir()
        text = "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 4
        rows = [{"messages": turns(f"u:{i}|a:{i} {text}")} for i in range(count)]
        recipe = recipe_of(folder, source(folder, "data", rows))
        del rows
        tracemalloc.start()
        try:
            lint(recipe)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(50)  # what is loaded once
    few, many = peak(100), peak(900)
    # The text of 800 rows is 180 kB, their tokens as lists ten times that.
    assert many - few < 800 * 1000, (few, many)


def test_token_rows_are_counted_apart_from_texts(tmp_path):
    text = "x" * 30
    rows = [{"text": text}, tokens_row(f"{text}b<|im_end|>", [0] * 30 + [1, 1])]
    measure = linted(tmp_path, rows).measure
    assert measure.sources["data"].texts == 1
    assert measure.answers == {2: 1}
    assert measure.ended == 1
    assert not measure.turns


@pytest.mark.parametrize("seed", range(5))
def test_percentiles_are_those_of_the_sorted_values(seed):
    values = np.random.default_rng(seed).integers(0, 500, 137)
    counts = Counter(values.tolist())
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        expected = np.quantile(values, share, method="inverted_cdf")
        assert percentile(counts, share) == expected
    bars = histogram(counts)
    assert sum(count for *_, count in bars) == 137
    assert bars[0][0] == 0
    assert bars[-1][1] >= max(values)
    assert len(bars) <= 24
    for low, high, count in bars:
        assert count == ((values >= low) & (values <= high)).sum()


def test_the_lowest_are_kept_in_order():
    kept = Lowest[str](3)
    for key in "qwertyuiop":
        kept.add(key, key)
    assert kept.items() == sorted("qwertyuiop")[:3]
    assert percentile(Counter(), 0.5) == 0
    assert histogram(Counter()) == []
