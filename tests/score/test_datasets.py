"""Data sets of the score: chosen as a harness does, rendered by the target's own template."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.durable.errors import DataError
from paceline.recipe.schema import Recipe, ScoreRecipe, ScoreSetRecipe, TargetRecipe
from paceline.recipe.score_inputs import CONVENTIONS, convention_record, score_settings
from paceline.score.datasets import dataset_prompts, later_prompt
from paceline.target.chat import load_tokenizer
from tiny_models import tiny_model

ROOM = 4000


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return str(tiny_model("llama", tmp_path_factory.mktemp("target") / "target"))


def written(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(path: Path, count: int) -> str:
    return written(path, [{"question": f"{n}?", "answer": ""} for n in range(count)])


def recipe_of(target: str, *datasets: ScoreSetRecipe, **score: object) -> Recipe:
    return Recipe(target=TargetRecipe(path=target), score=ScoreRecipe(datasets=datasets, **score))


def texts(recipe: Recipe, room: int = ROOM) -> list[str]:
    return [prompt.text for prompt in dataset_prompts(recipe, room=room)]


def test_dflash_takes_the_first_of_the_permutation_that_datasets_makes(target, tmp_path):
    asked = ScoreSetRecipe(path=numbered(tmp_path / "gsm8k.jsonl", 200), adapter="gsm8k")
    found = texts(recipe_of(target, asked, convention="dflash"))
    order = np.random.default_rng(0).permutation(200)[:128]
    assert [text.partition("?")[0] for text in found] == [str(n) for n in order]
    assert all(text.endswith("\\boxed{}.") for text in found)


def test_the_permutation_is_that_of_the_library(target, tmp_path):
    datasets = pytest.importorskip("datasets")
    found = datasets.Dataset.from_list([{"n": n} for n in range(200)]).shuffle(seed=0)
    assert found["n"][:128] == list(np.random.default_rng(0).permutation(200)[:128])


def test_eagle_takes_the_first_80_in_their_own_words(target, tmp_path):
    asked = ScoreSetRecipe(path=numbered(tmp_path / "gsm8k.jsonl", 100), adapter="gsm8k")
    recipe = recipe_of(target, asked, convention="eagle")
    assert texts(recipe) == [f"{n}?" for n in range(80)]
    settings = score_settings(recipe.score)
    assert (settings.warmup, settings.max_new_tokens) == (3, 1024)


def test_what_the_recipe_says_goes_before_the_convention_and_is_recorded(target, tmp_path):
    asked = ScoreSetRecipe(path=numbered(tmp_path / "q.jsonl", 100), adapter="gsm8k", limit=5)
    other = ScoreSetRecipe(path=numbered(tmp_path / "r.jsonl", 101), adapter="gsm8k")
    score = {"convention": "eagle", "max_new_tokens": 32, "max_prompts": 7}
    recipe = recipe_of(target, asked, other, **score)
    found = dataset_prompts(recipe, room=ROOM)
    # The first five of both are equal, and are scored once.
    assert [p.dataset for p in found] == ["q"] * 5 + ["r"] * 2
    record = convention_record(recipe.score)
    assert record["set_by_recipe"] == {"max_prompts": 7, "max_new_tokens": 32}
    assert record["max_new_tokens"] == 1024, "what the harness itself does"
    assert score_settings(recipe.score).max_new_tokens == 32


def test_paceline_chooses_by_hash_so_that_the_order_of_rows_does_not_matter(target, tmp_path):
    rows = [{"prompt": f"say {n}"} for n in range(50)]
    one = ScoreSetRecipe(path=written(tmp_path / "a.jsonl", rows), limit=10)
    two = ScoreSetRecipe(path=written(tmp_path / "b.jsonl", rows[::-1]), limit=10)
    first, second = (texts(recipe_of(target, asked)) for asked in (one, two))
    assert first == second
    assert first != [f"say {n}" for n in range(10)]
    assert texts(recipe_of(target, one, seed=1)) != first


def test_a_later_turn_is_rendered_after_the_targets_own_answer(target, tmp_path):
    rows = [{"turns": ["first", "second", "third"], "category": "writing"}]
    asked = ScoreSetRecipe(path=written(tmp_path / "q.jsonl", rows), adapter="mt_bench")
    (prompt,) = dataset_prompts(recipe_of(target, asked), room=ROOM)
    tokenizer = load_tokenizer(target)
    turns = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "ONE"},
        {"role": "user", "content": "second"},
    ]

    def rendered(messages: list[dict]) -> tuple[int, ...]:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    assert prompt.domain == "writing"
    assert prompt.input_ids == rendered(turns[:1])
    assert later_prompt(tokenizer, {}, prompt, ["ONE"]) == rendered(turns)
    turns += [{"role": "assistant", "content": "TWO"}, {"role": "user", "content": "third"}]
    assert later_prompt(tokenizer, {}, prompt, ["ONE", "TWO"]) == rendered(turns)


def test_deepspec_asks_the_first_turn_alone(target, tmp_path):
    rows = [{"turns": ["first", "second"]}]
    asked = ScoreSetRecipe(path=written(tmp_path / "q.jsonl", rows), adapter="mt_bench")
    (prompt,) = dataset_prompts(recipe_of(target, asked, convention="deepspec"), room=ROOM)
    assert prompt.later == ()
    assert score_settings(ScoreRecipe(convention="deepspec")).seed == 980406


def test_prompts_without_room_for_all_their_turns_are_left_out_and_told(target, tmp_path, caplog):
    rows = [{"turns": ["one"]}, {"turns": ["one", "two"]}]
    asked = ScoreSetRecipe(path=written(tmp_path / "q.jsonl", rows), adapter="mt_bench")
    recipe = recipe_of(target, asked, max_new_tokens=500)
    (prompt,) = dataset_prompts(recipe, room=400)
    assert prompt.later == ()
    assert "q: 1 of 2 prompts are left out" in caplog.text
    with pytest.raises(DataError, match=r"q\.jsonl: none of its 2 prompts can be scored"):
        dataset_prompts(recipe, room=2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"problem": "x"}', r"gsm8k\.jsonl, row 3: not a row of gsm8k \(no text in `question`"),
        ("{broken", r"gsm8k\.jsonl, row 3: bad_json"),
        ("[1]", r"gsm8k\.jsonl, row 3: not_an_object"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(target, tmp_path, line, words):
    path = Path(numbered(tmp_path / "gsm8k.jsonl", 2))
    path.write_text(path.read_text() + line + "\n")
    asked = ScoreSetRecipe(path=str(path), adapter="gsm8k")
    with pytest.raises(DataError, match=words):
        dataset_prompts(recipe_of(target, asked), room=ROOM)


def test_an_empty_data_set_is_an_error(target, tmp_path):
    asked = ScoreSetRecipe(path=written(tmp_path / "q.jsonl", []))
    with pytest.raises(DataError, match=r"q\.jsonl: no rows"):
        dataset_prompts(recipe_of(target, asked), room=ROOM)


def test_every_convention_says_all_that_a_recipe_may_leave_open():
    for name in CONVENTIONS:
        settings = score_settings(replace(ScoreRecipe(), convention=name))
        assert settings.max_new_tokens >= 1
        assert settings.convention.temperatures
