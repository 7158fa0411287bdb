import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
import torch

from drafting import TAPS, load_tiny_target, tiny_drafter
from paceline.decode.speculate import decode_plain
from paceline.drafter.checkpoint import load_drafter, save_drafter
from paceline.durable.errors import DataError, NotLossless, RecipeChanged, TargetError
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import (
    DrafterRecipe,
    Recipe,
    ScoreRecipe,
    ScoreSetRecipe,
    TargetRecipe,
)
from paceline.recipe.stage import StageRecord, read_record
from paceline.score import choose, stage
from paceline.score import prompt as prompt_module
from paceline.target.chat import load_tokenizer
from paceline.types.sample import Sample, Split, encode_sample


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def scored(target, tmp_path):
    """A run with a trained drafter and held-out prompts of two data sets."""
    recipe = Recipe(
        target=TargetRecipe(path=str(target.folder)),
        drafter=DrafterRecipe(block_size=4),
        score=ScoreRecipe(
            max_prompts=3,
            max_new_tokens=12,
            budgets=(4,),
            walk_budgets=(2, 8),
            walk_check_prompts=2,
        ),
    )
    run_dir = RunDir(tmp_path / "run")
    best = run_dir.checkpoints / "step_000001"
    best.mkdir(parents=True)
    save_drafter(tiny_drafter(target), best)
    config = best / "config.json"
    record = StageRecord(run_dir.checkpoints, "train", {"made": "by the test"})
    record.begin()
    record.finish([best / "model.safetensors", config], {"best": best.name})
    generator = torch.Generator().manual_seed(3)
    run_dir.corpus.mkdir()
    with run_dir.regenerated.open("wb") as file:
        for number in range(10):
            ids = torch.randint(0, 256, (5 + number,), generator=generator).tolist()
            file.write(
                encode_sample(
                    Sample(
                        sample_id=f"{number:032x}",
                        prompt_id=f"{number:032x}",
                        source="first" if number < 5 else "second",
                        split=Split.HELDOUT,
                        messages=[],
                        input_ids=ids,
                        loss_spans=[],
                    )
                )
            )
    return recipe, run_dir


def load(run_dir) -> dict:
    return json.loads((run_dir.score / "result.json").read_text())


def test_the_result_is_complete_and_follows_its_schema(scored):
    recipe, run_dir = scored
    report = stage.run(recipe, run_dir)
    result = load(run_dir)
    schema = json.loads((files("paceline.score") / "result.schema.json").read_text())
    jsonschema.validate(result, schema)
    assert set(result["pooled"]) == {"chain", "ddtree-2", "ddtree-4", "ddtree-8"}
    assert result["pooled"]["chain"]["how"] == result["pooled"]["ddtree-4"]["how"] == "decoded"
    assert result["pooled"]["ddtree-2"]["how"] == result["pooled"]["ddtree-8"]["how"] == "walk"
    assert set(result["datasets"]) == {"first", "second"}
    assert len(result["prompts"]) == 6
    lossless = result["lossless"]
    # Chain and one budget on six prompts, two walk budgets on two more or less evenly spread ones.
    assert lossless["checked"] == 6 * 2 + 2 * 2
    assert lossless["identical"] == lossless["checked"]
    assert lossless["walk_equal"] == lossless["walk_checked"] == lossless["checked"]
    assert any("chain" in line for line in report.lines)


def test_temperatures_are_measured_side_by_side_and_losslessly(scored):
    recipe, run_dir = scored
    asked = replace(
        recipe.score, temperatures=(0.0, 0.8), top_p=0.95, drafting=("coupled", "sampled")
    )
    report = stage.run(replace(recipe, score=asked), run_dir)
    result = load(run_dir)
    schema = json.loads((files("paceline.score") / "result.schema.json").read_text())
    jsonschema.validate(result, schema)
    drawn = {"chain@t0.8", "ddtree-4@t0.8", "chain-coupled@t0.8", "chain-sampled@t0.8"}
    assert drawn | {"chain", "ddtree-4"} <= set(result["pooled"])
    assert [setting["temperature"] for setting in result["settings"]] == [0, 0.8]
    lossless = result["lossless"]
    # The residual rule gives other tokens of the same distribution: it is not compared.
    assert lossless["checked"] == lossless["identical"] == 2 * (6 * 2 + 2 * 2) + 6
    assert lossless["walk_equal"] == lossless["walk_checked"] == lossless["checked"] - 6
    answers = {p["temperature"]: p["answer_ids"] for p in result["prompts"][:2]}
    assert answers[0] != answers[0.8]
    assert any("0.8" in line for line in report.lines)


def test_tau_can_be_recomputed_from_the_raw_rounds(scored):
    recipe, run_dir = scored
    stage.run(recipe, run_dir)
    result = load(run_dir)
    rounds = [r for p in result["prompts"] for r in p["methods"]["chain"]["rounds"]]
    assert result["pooled"]["chain"]["tau"] == pytest.approx(sum(rounds) / len(rounds))


def test_a_stage_run_twice_does_the_work_once_and_a_change_is_refused(scored):
    recipe, run_dir = scored
    stage.run(recipe, run_dir)
    before = (run_dir.score / "result.json").stat().st_mtime_ns
    again = stage.run(recipe, run_dir)
    assert again.skipped
    assert any("chain" in line for line in again.lines), "the table is shown again"
    assert (run_dir.score / "result.json").stat().st_mtime_ns == before
    changed = replace(recipe, score=replace(recipe.score, max_new_tokens=13))
    with pytest.raises(RecipeChanged, match=r"score\.max_new_tokens: 12 -> 13"):
        stage.run(changed, run_dir)


def test_interrupted_it_goes_on_after_the_last_prompt(scored, monkeypatch):
    recipe, run_dir = scored
    original = prompt_module.PromptScorer.__call__
    calls = []

    def failing(self, prompt):
        calls.append(prompt.prompt_id)
        if len(calls) == 4:
            raise RuntimeError("the power went")
        return original(self, prompt)

    monkeypatch.setattr(prompt_module.PromptScorer, "__call__", failing)
    with pytest.raises(Exception, match="the power went"):
        stage.run(recipe, run_dir)
    monkeypatch.setattr(
        prompt_module.PromptScorer,
        "__call__",
        lambda s, p: (calls.append("more"), original(s, p))[1],
    )
    stage.run(recipe, run_dir)
    assert calls.count("more") == 3
    assert len(load(run_dir)["prompts"]) == 6


def test_a_wrong_answer_fails_the_stage_after_writing_the_result(scored, monkeypatch):
    recipe, run_dir = scored
    original = prompt_module.decode_speculative

    def wrong(*arguments, **keywords):
        decoded = original(*arguments, **keywords)
        return replace(decoded, ids=(*decoded.ids[:-1], decoded.ids[-1] ^ 1))

    monkeypatch.setattr(prompt_module, "decode_speculative", wrong)
    monkeypatch.setattr(prompt_module, "NEAR_TIE", {}, raising=False)
    with pytest.raises(NotLossless, match="not what the target says"):
        stage.run(recipe, run_dir)
    assert load(run_dir)["lossless"]["violations"]


def test_pitfall_32_a_drafter_of_another_target_is_refused(scored):
    recipe, run_dir = scored
    config = run_dir.checkpoints / "step_000001" / "config.json"
    drafter = load_drafter(config.parent)
    drafter.config = replace(drafter.config, target_identity="another")
    save_drafter(drafter, config.parent)
    with pytest.raises(TargetError, match="trained for"):
        stage.run(recipe, run_dir)


def test_without_training_there_is_nothing_to_score(scored):
    recipe, run_dir = scored
    (run_dir.checkpoints / "train.stage.json").unlink()
    with pytest.raises(DataError, match="paceline train"):
        stage.run(recipe, run_dir)


def test_the_taps_are_those_of_the_drafter(scored, target):
    """A drafter with other taps still scores: its own config says which layers it reads."""
    recipe, run_dir = scored
    assert load_drafter(run_dir.checkpoints / "step_000001").config.taps == TAPS
    assert stage.run(recipe, run_dir).numbers["chain"] >= 1.0


def test_prompts_without_room_are_left_out_and_said(scored, target, caplog):
    recipe, run_dir = scored
    room = target.spec.max_position - recipe.drafter.block_size
    # Prompts have 5 to 14 tokens: those of 5 and 6 fit, a huge tree takes no more positions.
    tight = replace(recipe.score, max_prompts=None, max_new_tokens=room - 6, budgets=(400,))
    chosen = choose.choose_prompts(replace(recipe, score=tight), run_dir)
    assert sorted(len(p.input_ids) for p in chosen) == [5, 6]
    assert "8 held-out prompts are left out" in caplog.text
    none = replace(recipe.score, max_new_tokens=target.spec.max_position)
    with pytest.raises(DataError, match="all 10 held-out prompts are too long"):
        stage.run(replace(recipe, score=none), run_dir)


@pytest.mark.parametrize(("asked", "marked"), [(0, 0), (1, 1), (4, 4), (6, 6), (99, 10)])
def test_as_many_prompts_prove_the_walk_as_asked_for(scored, asked, marked):
    recipe, run_dir = scored
    score = replace(recipe.score, max_prompts=None, walk_check_prompts=asked)
    chosen = choose.choose_prompts(replace(recipe, score=score), run_dir)
    assert sum(p.check_walk for p in chosen) == marked


@pytest.fixture
def with_datasets(scored, tmp_path):
    """The same run, scored on a data set of two turns and on one of problems."""
    recipe, run_dir = scored
    rows = [{"turns": [f"first {n}", f"second {n}"], "category": f"c{n % 2}"} for n in range(3)]
    mt_bench, gsm8k = tmp_path / "mt_bench.jsonl", tmp_path / "gsm8k.jsonl"
    mt_bench.write_text("".join(json.dumps(row) + "\n" for row in rows))
    gsm8k.write_text(json.dumps({"question": "one two three four five six seven eight nine"}))
    sets = (
        ScoreSetRecipe(path=str(mt_bench), adapter="mt_bench"),
        ScoreSetRecipe(path=str(gsm8k), adapter="gsm8k", name="problems"),
    )
    score = replace(recipe.score, datasets=sets, max_prompts=None)
    return replace(recipe, score=score), run_dir


def trained_on(run_dir, *texts: str) -> None:
    """Let the corpus hold these prompts, in training."""
    with run_dir.regenerated.open("ab") as file:
        for number, text in enumerate(texts):
            file.write(
                encode_sample(
                    Sample(
                        sample_id=f"{100 + number:032x}",
                        prompt_id=f"{100 + number:032x}",
                        source="train",
                        split=Split.TRAIN,
                        messages=[{"role": "user", "content": text}],
                        input_ids=[1, 2],
                        loss_spans=[],
                    )
                )
            )


def test_data_sets_are_scored_turn_by_turn_and_follow_the_schema(with_datasets, target):
    recipe, run_dir = with_datasets
    trained_on(run_dir, "zero one two three four five six seven eight")
    stage.run(recipe, run_dir)
    result = load(run_dir)
    schema = json.loads((files("paceline.score") / "result.schema.json").read_text())
    jsonschema.validate(result, schema)
    assert set(result["datasets"]) == {"mt_bench", "problems"}
    assert set(result["domains"]) == {"c0", "c1", "problems"}
    assert result["datasets"]["mt_bench"]["chain"]["prompts"] == 3
    answers = [a for a in result["prompts"] if a["dataset"] == "mt_bench"]
    assert sorted(a["turn"] for a in answers) == [0, 0, 0, 1, 1, 1]
    rounds = [n for a in answers for n in a["methods"]["chain"]["rounds"]]
    assert result["datasets"]["mt_bench"]["chain"]["rounds"] == len(rounds)
    assert result["lossless"]["identical"] == result["lossless"]["checked"]
    # Nine words hold two 8-grams, of which a training prompt has one.
    assert result["overlap"]["problems"]["shared_grams"] == 1
    assert result["overlap"]["problems"]["grams"] == 2
    assert result["overlap"]["mt_bench"]["shared_grams"] == 0


def test_the_second_turn_follows_the_targets_own_first_answer(with_datasets, target):
    recipe, run_dir = with_datasets
    stage.run(recipe, run_dir)
    tokenizer = load_tokenizer(recipe.target.path)
    by_turn = {(a["prompt_id"], a["turn"]): a for a in load(run_dir)["prompts"]}
    seconds = [a for (_, turn), a in by_turn.items() if turn == 1]
    assert len(seconds) == 3
    for second in seconds:
        first = by_turn[second["prompt_id"], 0]
        said = tokenizer.decode(first["answer_ids"], skip_special_tokens=True)
        messages = [
            {"role": "user", "content": first["text"]},
            {"role": "assistant", "content": said},
            {"role": "user", "content": second["text"]},
        ]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert second["prompt_tokens"] == len(ids)
        plain = decode_plain(
            target, ids, taps=TAPS, max_new_tokens=12, eos_ids=frozenset(target.spec.eos_token_ids)
        )
        assert tuple(second["answer_ids"]) == plain.ids


def test_a_changed_data_set_is_another_score(with_datasets):
    recipe, run_dir = with_datasets
    stage.run(recipe, run_dir)
    assert stage.run(recipe, run_dir).skipped
    path = recipe.score.datasets[1].path
    with Path(path).open("a") as file:
        file.write("\n" + json.dumps({"question": "more"}))
    with pytest.raises(RecipeChanged, match=r"score\.datasets\.1\.content"):
        stage.run(recipe, run_dir)


def test_the_warm_up_is_short_and_in_no_number(scored, monkeypatch):
    recipe, run_dir = scored
    original = prompt_module.decode_speculative
    limits = []

    def counted(*arguments, **keywords):
        limits.append(keywords["max_new_tokens"])
        return original(*arguments, **keywords)

    monkeypatch.setattr(prompt_module, "decode_speculative", counted)
    score = replace(recipe.score, warmup=2, max_new_tokens=20)
    stage.run(replace(recipe, score=score), run_dir)
    result = load(run_dir)
    # Each of two prompts: the chain, one budget, two walk budgets.
    assert limits[:8] == [16] * 8
    assert set(limits[8:]) == {20}
    assert len(limits[8:]) == result["lossless"]["checked"]
    assert result["provenance"]["warmup"] == 2
    assert result["timings"]["chain"]["rounds"] == result["pooled"]["chain"]["rounds"]


def test_a_result_of_an_older_version_is_set_aside_and_measured_anew(scored):
    recipe, run_dir = scored
    stage.run(recipe, run_dir)
    record = read_record(run_dir.score, "score")
    older = StageRecord(run_dir.score, "score", {**record.fields, "format": 1}, allowed=("format",))
    older.begin()
    older.finish([run_dir.score / "result.json"], record.report)
    again = stage.run(recipe, run_dir)
    assert not again.skipped
    assert (run_dir.score / "result-1.json").is_file()
    assert load(run_dir)["schema_version"] == 2
