"""Tokenizer against lm_head, the mask token, and what the template makes of the first row."""

import dataclasses
import json

import pytest

from doctor_worlds import only, world_of
from fixtures_corpus import write_jsonl
from paceline.cli.doctor import _first_row
from paceline.doctor.checks import mask_token, template, vocabulary
from paceline.drafter.build import is_mask_token
from paceline.pipeline import run_stage
from paceline.recipe.load import load_recipe
from paceline.recipe.run_dir import RunDir
from paceline.target.fit import mask_problem
from paceline.target.spec import read_spec
from tiny_models import END_OF_TEXT, IM_END, IM_START, TOKENIZER_SIZE
from tiny_run import tiny_project


@pytest.fixture
def recipe(tmp_path):
    return tiny_project(tmp_path)


@pytest.fixture
def target(recipe):
    return recipe.parent / "target"


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def add_tokens(target, count):
    """Give the tokenizer `count` ids more."""
    path = target / "tokenizer.json"
    content = json.loads(path.read_text())
    for token in range(TOKENIZER_SIZE, TOKENIZER_SIZE + count):
        content["added_tokens"].append({**content["added_tokens"][0], "id": token,
                                        "content": f"<|extra {token}|>"})  # fmt: skip
    path.write_text(json.dumps(content))


# Vocabulary.


def test_t_28_a_padded_lm_head_is_fine_and_said_to_be(recipe, target):
    add_tokens(target, 300 - TOKENIZER_SIZE)
    [found] = vocabulary.check(world_of(recipe))
    assert found.severity == "ok"
    assert found.what == "tokenizer 300 ids, lm_head 320 rows, 20 padding rows"


def test_a_tokenizer_larger_than_lm_head_is_an_error(recipe, target):
    add_tokens(target, 330 - TOKENIZER_SIZE)
    [error] = only(vocabulary.check(world_of(recipe)), "error")
    assert error.what == "tokenizer.json has 330 ids, lm_head 320 rows"


def test_weights_of_another_vocabulary_than_the_config_are_an_error(recipe, target):
    edit(target / "config.json", vocab_size=400)
    found = only(vocabulary.check(world_of(recipe)), "error")
    assert [f.what for f in found] == [
        "lm_head.weight has 320 rows, config.json says vocab_size 400",
        "model.embed_tokens.weight has 320 rows, config.json says vocab_size 400",
    ]


def test_a_broken_download_is_an_error_before_anything_is_loaded(recipe, target):
    weights = target / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1000])
    [error] = only(vocabulary.check(world_of(recipe)), "error")
    assert error.what == f"{weights}: {len(data) - 1000:,} bytes, its header says {len(data):,}"
    weights.write_bytes(data[:20])
    [error] = vocabulary.check(world_of(recipe))
    assert error.severity == "error"
    assert "not a safetensors file" in error.what


def test_a_draft_vocabulary_larger_than_the_target_is_an_error(recipe):
    found = list(vocabulary.check(world_of(recipe, "drafter.draft_vocab=300")))
    assert only(found, "error")[0].mend == f"--set drafter.draft_vocab={TOKENIZER_SIZE}"


def test_a_folder_without_weights_is_an_error(recipe, target):
    (target / "model.safetensors").unlink()
    [error] = vocabulary.check(world_of(recipe))
    assert error.severity == "error"


# Mask token.


@pytest.mark.parametrize(
    ("token", "severity", "words"),
    [
        (320, "error", "is no row of the embedding, which has 320"),
        (IM_END, "error", "ends an answer"),
        (300, "ok", "is a padding row"),
        (IM_START, "ok", "is a special token"),
        (END_OF_TEXT, "ok", "is a special token"),
        (65, "warning", "is an ordinary token"),
    ],
)
def test_the_mask_token_is_judged_as_the_training_would(recipe, target, token, severity, words):
    [found] = mask_token.check(world_of(recipe, f"drafter.mask_token_id={token}"))
    assert (found.severity, words in found.what) == (severity, True)
    spec = read_spec(target, identify=False)
    assert is_mask_token(token, spec, ()) == (severity != "error")


def test_every_token_gets_the_answer_of_the_training(recipe, target):
    edit(target / "config.json", pad_token_id=10, bos_token_id=11)
    spec = read_spec(target, identify=False)
    for token in range(330):
        assert bool(mask_problem(token, spec)) != is_mask_token(token, spec, ())


def test_a_mask_token_that_occurs_in_the_corpus_is_an_error(recipe):
    run = RunDir(recipe.parent / "run")
    run_stage("prepare", load_recipe(recipe), run)
    [error] = mask_token.check(world_of(recipe, f"drafter.mask_token_id={IM_START}"))
    assert error.severity == "error"
    assert "occurs in the corpus (sample " in error.what
    [found] = mask_token.check(world_of(recipe, "drafter.mask_token_id=300"))
    assert found.what.endswith("occurs nowhere in all 19 samples")


def test_the_mask_token_of_a_warm_start_is_judged_too(recipe, tmp_path):
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"mask_token_id": IM_END}))
    [error] = mask_token.check(world_of(recipe, f"drafter.warm_start={folder}"))
    assert error.what.startswith(f"drafter.warm_start: {IM_END} ends an answer")


def test_without_padding_rows_a_special_token_or_a_warning(recipe, target):
    [found] = mask_token.check(world_of(recipe))
    assert found.what == f"row {TOKENIZER_SIZE}, behind the tokenizer's last token, is taken"
    add_tokens(target, 320 - TOKENIZER_SIZE)
    [found] = mask_token.check(world_of(recipe))
    assert "special tokens" in found.what
    path = target / "tokenizer.json"
    content = json.loads(path.read_text())
    for token in content["added_tokens"]:
        token["special"] = False
    path.write_text(json.dumps(content))
    [found] = mask_token.check(world_of(recipe))
    assert found.severity == "warning"


# Template.


def rows(recipe, *messages):
    write_jsonl(recipe.parent / "train.jsonl", [{"messages": list(m)} for m in messages])


USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "ok"}
ANSWERED = ("regenerate.enabled=false",)


def look(recipe, *overrides):
    return list(template.check(world_of(recipe, *overrides, first_row=_first_row)))


def test_the_first_row_is_shown_with_its_mask(recipe):
    rows(recipe, [USER, ANSWER])
    [found] = look(recipe, *ANSWERED)
    assert found.severity == "ok"
    assert found.what == (
        "3 trained (between ⟦ and ⟧): row 1 of train, 25 tokens: "
        "<|im_start|>user↵hi<|im_end|>↵<|im_start|>assistant↵⟦ok<|im_end|>⟧↵"
    )


def test_it_is_the_mask_that_prepare_makes(recipe):
    rows(recipe, [USER, ANSWER])
    from paceline.types.sample import read_samples

    run = RunDir(recipe.parent / "run")
    asked = (*ANSWERED, "corpus.validation_fraction=0")
    run_stage("prepare", load_recipe(recipe, asked), run)
    [sample] = [s for s in read_samples(run.prepared) if s.source == "train"]
    shown = _first_row(load_recipe(recipe, asked))
    assert shown.trained == sample.num_loss_tokens
    assert shown.tokens == len(sample.input_ids)


def test_a_prompt_that_the_target_answers_is_shown_as_such(recipe):
    [found] = look(recipe)
    assert found.severity == "ok"
    assert found.what.endswith("(a prompt: the target answers it itself)")


def test_a_template_that_cannot_render_an_answer_is_an_error(recipe, target):
    (target / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    [error] = look(recipe)
    assert error.severity == "error"
    assert "cannot render one question and its answer" in error.what


def test_rows_that_cannot_be_used_are_counted_with_the_reason(recipe):
    rows(recipe, [ANSWER], [USER, ANSWER])
    [warning, ok] = look(recipe, *ANSWERED)
    assert warning.severity == "warning"
    assert "the first 1 row cannot be used (no_user_turn" in warning.what
    assert ok.what.startswith("3 trained (between ⟦ and ⟧): row 2 of train")
    rows(recipe, *[[ANSWER]] * 120)
    [error] = look(recipe, *ANSWERED)
    assert error.severity == "error"
    assert "none of 100 rows can be used" in error.what


def test_a_mask_that_tells_nothing_apart_is_an_error():
    preview = template.MaskPreview(source="x", row=1, text="⟦a⟧", tokens=1, trained=1)
    assert template._judged(preview, "").severity == "error"
    none = dataclasses.replace(preview, trained=0)
    assert "no token would be trained on" in template._judged(none, "").what


def test_a_long_row_is_shown_by_its_ends():
    assert template._cut("a" * 400 + "\n" + "b" * 400) == "a" * 300 + " … " + "b" * 300
