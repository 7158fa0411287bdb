"""`demo/cases.jsonl`: every row of it ends as `demo/cases.md` says, whatever the template."""

import pytest

from chat_templates import FAMILIES
from checkout import ROOT
from fixtures_chatml import ALTERNATING, byte_chatml
from fixtures_corpus import quarantine_of, recipe_of, samples_of
from paceline.corpus import stage
from paceline.recipe.run_dir import RunDir
from paceline.rows.formats import read_rows

CASES = ROOT / "demo" / "cases.jsonl"
LISTED = ROOT / "demo" / "cases.md"

REASONS = {
    3: "too_few_loss_tokens",
    11: "duplicate",
    13: "duplicate",
    15: "bad_tools_json",
    18: "bad_json",
    20: "bad_utf8",
}
BLANK = 19
LINES = 20


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path / "run")


def prepared(tmp_path, run_dir, tokenizer=None, **corpus):
    """The report, what was left out by line, and the accepted samples by line."""
    report = stage.run(recipe_of(tmp_path, CASES, tokenizer=tokenizer, **corpus), run_dir)
    reasons = {row["line"]: row["reason"] for row in quarantine_of(run_dir)}
    accepted = [n for n in range(1, LINES + 1) if n not in reasons and n != BLANK]
    return report, reasons, dict(zip(accepted, samples_of(run_dir), strict=True))


def ones(sample):
    return sample.loss_mask().nonzero().flatten().tolist()


def test_the_file_is_what_its_description_says():
    rows = list(read_rows(CASES, None))
    assert len(rows) == LINES
    assert [row.line for row in rows if row.is_blank] == [BLANK]
    raw = CASES.read_bytes()
    assert raw.startswith(b"\xef\xbb\xbf")
    assert raw.count(b"\r\n") == 3
    named = [row.value["id"][:4] for row in rows if row.value and "id" in row.value]
    assert sorted(set(named)) == [f"T-{n:02}" for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13)]
    listed = LISTED.read_text("utf-8")
    for line, reason in REASONS.items():
        assert any(f"`{reason}`" in text and f"{line} |" in text for text in listed.splitlines()), (
            line
        )
    assert f"{LINES - len(REASONS) - 1} accepted, {len(REASONS)} quarantined, 1 blank" in listed


def test_every_row_ends_as_listed_and_the_masks_are_those_of_the_cases(tmp_path, run_dir):
    report, reasons, samples = prepared(tmp_path, run_dir)
    assert reasons == REASONS
    cases = report.numbers["sources"]["cases"]
    assert (cases["read"], cases["accepted"], cases["quarantined"], cases["blank"]) == (
        20,
        13,
        6,
        1,
    )
    assert [len(samples[line].input_ids) for line in (1, 2)] == [25, 32]
    assert {line: ones(samples[line]) for line in (1, 2, 4, 5)} == {
        1: [21, 22, 23],
        2: [29, 30],
        4: [35, 36, 37],
        5: [20, 21, 22, 44, 45, 46, 47, 48],
    }
    tokenizer = byte_chatml()
    trained = {
        line: [tokenizer.decode(sample.input_ids[a:b]) for a, b in sample.loss_spans]
        for line, sample in samples.items()
    }
    assert trained[6] == ["ok<|im_end|>"]
    assert trained[7] == ["\n\nok<|im_end|>"]
    assert trained[8] == ["x" * 100 + "<|im_end|>"]
    assert '"arguments": {"a": 1}' in trained[10][0]
    assert trained[10][1] == "It says 1.<|im_end|>"
    assert samples[12].tools is not None
    assert samples[14].tools is None


def test_the_same_rows_cut_short(tmp_path, run_dir):
    report, reasons, samples = prepared(tmp_path, run_dir, max_length=50)
    too_long = dict.fromkeys([9, 12, 13], "prompt_exceeds_max_length")
    assert reasons == REASONS | too_long
    assert ones(samples[8]) == list(range(21, 50))
    assert report.numbers["truncated"] == 3, "lines 7, 8 and 10"


def test_a_template_that_refuses_costs_its_rows_alone(tmp_path, run_dir):
    _, reasons, _ = prepared(tmp_path, run_dir, byte_chatml(ALTERNATING))
    refused = {line for line, reason in reasons.items() if reason == "template_rejected"}
    assert refused == {2, 4, 10, 11}
    assert {k: v for k, v in reasons.items() if k not in refused} == {
        k: v for k, v in REASONS.items() if k != 11
    }


@pytest.mark.parametrize("name", ["llama31", "qwen25", "smollm2"])
def test_other_templates_make_the_same_of_them(tmp_path, run_dir, name):
    _, reasons, _ = prepared(tmp_path, run_dir, FAMILIES[name].tokenizer())
    # SmolLM2's template knows no calls, and would have the model answer with nothing.
    without = dict.fromkeys([10, 11], "tool_calls_not_rendered") if name == "smollm2" else {}
    assert reasons == REASONS | without


def test_t_05_the_last_turn_alone(tmp_path, run_dir):
    _, _, samples = prepared(tmp_path, run_dir, last_turn_only=True)
    assert ones(samples[5]) == [44, 45, 46, 47, 48]
