"""Results beside each other."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from paceline.cli.main import main
from paceline.durable.errors import DataError
from paceline.score.compare import compare

Rounds = Mapping[str, list[int]]

ORIGIN = {
    "target_identity": "t", "template": "x", "template_args": {}, "max_new_tokens": 32,
    "dtype": "float32", "top_k": 0, "top_p": 1.0, "min_p": 0.0, "rounds_rule": "r",
    "drafter": "a", "device": "cpu", "torch": "2",
}  # fmt: skip


def run_with(
    folder: Path,
    rounds: Rounds,
    *,
    method: str = "chain",
    speedup: float | None = None,
    temperature: float = 0.0,
    datasets: Mapping[str, str] | None = None,
    **origin: object,
) -> Path:
    """A run directory with a result of one method."""
    prompts = [
        {
            "prompt_id": prompt,
            "dataset": (datasets or {}).get(prompt, "d"),
            "methods": {method: {"rounds": of, "how": "decoded"}},
        }
        for prompt, of in rounds.items()
    ]
    result = {
        "schema_version": 2,
        "settings": [{"temperature": temperature}],
        "provenance": ORIGIN | {"drafter": folder.name} | origin,
        "prompts": prompts,
        "cost": {method: {"speedup_wall": speedup}} if speedup else {},
    }
    (folder / "score").mkdir(parents=True)
    (folder / "score" / "result.json").write_text(json.dumps(result))
    return folder


def some_rounds(prompts: int, *, more: int = 0) -> dict[str, list[int]]:
    """Rounds of 1 to 4 tokens; each of another `more` tokens longer."""
    generator = np.random.default_rng(3)
    return {f"p{n}": (generator.integers(1, 5, 6) + more).tolist() for n in range(prompts)}


def test_a_better_drafter_is_told_with_its_interval(tmp_path):
    one = run_with(tmp_path / "a", some_rounds(20), speedup=1.5)
    two = run_with(tmp_path / "b", some_rounds(20, more=1))
    found = compare([one, two])
    (table,) = found.tables
    first, second = table.rows
    assert (found.prompts, table.prompts, found.notes) == (20, 20, ())
    assert (first.result, first.method, first.speedup, first.to_first) == ("a", "chain", 1.5, None)
    tau = sum(map(sum, some_rounds(20).values())) / 120
    assert first.tau == pytest.approx(tau)
    assert second.tau == pytest.approx(tau + 1)
    assert second.to_first is not None
    assert second.to_first.value == pytest.approx(1.0)
    assert second.to_first.is_significant


def test_only_common_prompts_count_and_it_is_said(tmp_path):
    one = run_with(tmp_path / "a", {"p": [2, 2], "q": [4], "only": [9, 9]})
    two = run_with(tmp_path / "b", {"p": [1, 1], "q": [4], "r": [1]})
    found = compare([one, two])
    assert found.prompts == found.tables[0].prompts == 2
    assert [row.tau for row in found.tables[0].rows] == pytest.approx([8 / 3, 2.0])
    assert [note.partition(" left")[0] for note in found.notes] == [
        "a: 1 prompt of 3", "b: 1 prompt of 3",
    ]  # fmt: skip


def test_turns_of_a_prompt_are_pooled_and_prompts_without_a_round_left_out(tmp_path):
    one = run_with(tmp_path / "a", {"p": [2, 2], "q": []})
    two = run_with(tmp_path / "b", {"p": [3], "q": []})
    path = one / "score" / "result.json"
    result = json.loads(path.read_text())
    result["prompts"].append(
        {"prompt_id": "p", "dataset": "d", "methods": {"chain": {"rounds": [5]}}}
    )
    path.write_text(json.dumps(result))
    found = compare([one, two])
    assert found.tables[0].prompts == 1
    assert found.tables[0].rows[0].tau == 3.0


def test_each_data_set_has_a_table_of_its_own_where_there_are_several(tmp_path):
    datasets = {"p0": "x", "p1": "x", "p2": "y"}
    runs = [run_with(tmp_path / n, some_rounds(3), datasets=datasets) for n in "ab"]
    found = compare(runs)
    assert [(t.dataset, t.prompts) for t in found.tables] == [("", 3), ("x", 2), ("y", 1)]
    assert all(row.speedup is None for table in found.tables[1:] for row in table.rows)


def test_methods_that_the_first_lacks_have_no_difference(tmp_path):
    one = run_with(tmp_path / "a", some_rounds(3))
    two = run_with(tmp_path / "b", some_rounds(3), method="ddtree-8")
    rows = compare([one, two]).tables[0].rows
    assert [(r.result, r.method, r.to_first) for r in rows] == [
        ("a", "chain", None), ("b", "ddtree-8", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_identity": "u"}, "b: another target than a (t and u)"),
        ({"template_args": {"k": 1}}, "b: other template arguments than a"),
        ({"max_new_tokens": 64}, "b: another score.max_new_tokens than a (32 and 64)"),
        ({"top_k": 20}, "b: another score.top_k than a (0 and 20)"),
        ({"top_p": 0.9}, "b: another score.top_p than a (1.0 and 0.9)"),
        ({"min_p": 0.1}, "b: another score.min_p than a (0.0 and 0.1)"),
        ({"temperature": 0.7}, "b: other temperatures than a (0 and 0.7)"),
        ({"device": "cuda:0"}, "b: measured on another machine than a"),
        ({"drafter": "a"}, "b: the very drafter of a"),
    ],
)
def test_what_makes_them_incomparable_is_noted(tmp_path, changes, said):
    one = run_with(tmp_path / "a", some_rounds(3))
    two = run_with(tmp_path / "b", some_rounds(3), **changes)
    (note,) = compare([one, two]).notes
    assert said in note


def test_results_of_the_first_version_can_be_compared(tmp_path):
    runs = [run_with(tmp_path / n, some_rounds(4)) for n in "ab"]
    path = runs[0] / "score" / "result.json"
    result = json.loads(path.read_text()) | {"schema_version": 1}
    del result["settings"], result["provenance"]["template"]
    path.write_text(json.dumps(result | {"plain": {"tokens": 3}}))
    assert compare(runs).notes == ()


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = [run_with(tmp_path / n / "run", some_rounds(2), drafter=n) for n in "ab"]
    files = [run / "score" / "result.json" for run in runs]
    assert list(compare(runs).results) == ["a/run", "b/run"]
    assert list(compare(files).results) == ["a/run", "b/run"]
    assert len(compare([runs[0], runs[0]]).results) == 2


def test_without_a_common_prompt_there_is_nothing_to_compare(tmp_path):
    one = run_with(tmp_path / "a", {"p": [1]})
    two = run_with(tmp_path / "b", {"q": [1]})
    with pytest.raises(DataError, match="no prompt in common"):
        compare([one, two])


@pytest.mark.parametrize("content", ["", "{broken", "[]", '{"pooled": {}}'])
def test_what_is_no_result_ends_with_2(tmp_path, capsys, content):
    one = run_with(tmp_path / "a", {"p": [1]})
    bad = tmp_path / "bad.json"
    bad.write_text(content)
    assert main(["compare", str(one), str(bad)]) == 2
    assert "bad.json: not a result of `paceline score`" in capsys.readouterr().err
    assert main(["compare", str(one), str(tmp_path / "none")]) == 2
    assert "no result here" in capsys.readouterr().err
    assert main(["compare", str(one)]) == 2
    assert "give two runs, or more" in capsys.readouterr().err


def test_the_command_shows_tables_and_notes(tmp_path, capsys):
    one = run_with(tmp_path / "a", some_rounds(20), speedup=1.5)
    two = run_with(tmp_path / "b", some_rounds(20, more=1), max_new_tokens=64)
    assert main(["compare", str(one), str(two)]) == 0
    shown = capsys.readouterr().out
    assert "τ, over 20 common prompts" in shown
    assert "+1.000 *" in shown
    assert "1.50x" in shown
    assert "note: b: another score.max_new_tokens" in shown


def test_json_is_the_comparison(tmp_path, capsys):
    runs = [run_with(tmp_path / n, some_rounds(5)) for n in "ab"]
    assert main(["compare", *map(str, runs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompts"] == 5
    assert found["tables"][0]["rows"][1]["to_first"]["p_value"] == 1.0
