from dataclasses import replace

import pytest
import torch

from paceline.durable.errors import TargetError
from paceline.recipe.schema import TargetRecipe
from paceline.target.check import self_check
from paceline.target.load import Target, load_target
from paceline.types import Features
from token_batches import random_batch

KINDS = ["llama", "qwen2", "qwen3", "qwen3_5", "qwen3_next"]
BATCH = random_batch([30, 100, 12, 25, 40])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_passes(kind, dtype, tiny_folder):
    target = load_target(TargetRecipe(path=str(tiny_folder(kind)), dtype=dtype))
    self_check(target, BATCH, (1, 3, 4))


class Sabotaged(Target):
    """A target whose capture is wrong in one way."""

    def __init__(self, whole, change):
        super().__init__(spec=whole.spec, model=whole.model, folder=whole.folder)
        self._change = change

    def capture(self, batch, taps, *, last=False, chunk_tokens=None):
        features = super().capture(batch, taps, last=last, chunk_tokens=chunk_tokens)
        return self._change(features, super().capture)


def shifted_layers(features, capture):
    other = capture(features.tokens, tuple(t - 1 for t in features.layer_ids), last=True)
    return Features(features.tokens, other.taps, features.last, features.layer_ids)


def un_normed_last(features, capture):
    return Features(features.tokens, features.taps, features.taps[:, -1], features.layer_ids)


def not_a_number(features, capture):
    taps = features.taps.clone()
    taps[7, 1, 3] = torch.nan
    return Features(features.tokens, taps, features.last, features.layer_ids)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shifted_layers, "sample s0, tap 1"),
        (un_normed_last, "sample s0, last hidden state"),
        (not_a_number, "sample s0, tap 3, token 7"),
    ],
)
def test_pitfalls_07_and_08_a_wrong_capture_is_named(change, message, tiny_target):
    with pytest.raises(TargetError, match=message):
        self_check(Sabotaged(tiny_target("llama"), change), BATCH, (1, 3, 4))


def test_an_lm_head_that_is_not_the_models_is_named(tiny_target):
    target = tiny_target("llama")
    head = target.head
    object.__setattr__(head, "lm_head", head.lm_head.roll(1, 0))
    with pytest.raises(TargetError, match=r"lm_head\(last\) prefers"):
        self_check(target, BATCH, (1, 3))


def broken(target, token):
    """The target makes no numbers of this token, nor of what follows it."""
    with torch.no_grad():
        target.model.get_input_embeddings().weight[token] = torch.inf
    return target


def test_a_sample_that_the_model_itself_makes_no_numbers_of_stops_no_run(tiny_target):
    """It is set aside by name when it is extracted, wherever it stands in the corpus."""
    ids = BATCH.input_ids.clone()
    ids[ids == 77] = 78
    ids[5] = 77  # of the first sample
    batch = replace(BATCH, input_ids=ids)
    target = broken(tiny_target("llama"), 77)
    self_check(target, batch, (1, 3, 4))
    # Numbers where the model has none are no less wrong than the other way round.
    zeros = Sabotaged(target, zeroed)
    with pytest.raises(TargetError, match="sample s0, tap 1"):
        self_check(zeros, batch, (1, 3, 4))


def zeroed(features, capture):
    return replace(features, taps=features.taps.nan_to_num(0.0, 0.0, 0.0))


def test_a_target_that_makes_no_numbers_at_all_is_named(tiny_target):
    ids = torch.full_like(BATCH.input_ids, 77)
    with pytest.raises(TargetError, match=r"not finite in torch\.float32, in any sample"):
        self_check(broken(tiny_target("llama"), 77), replace(BATCH, input_ids=ids), (1, 3))
