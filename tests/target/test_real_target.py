from pathlib import Path

import pytest
import torch

from paceline.recipe.schema import TargetRecipe
from paceline.target.check import self_check
from paceline.target.load import Target, load_target
from paceline.target.taps import default_taps
from paceline.types import TokenBatch

FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "smollm2"
QUESTIONS = ["What is the capital of France?", "Say hello.", "List three primes below 2024."]

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def smollm2() -> Target:
    if not FOLDER.is_dir():
        pytest.skip(f"NOT RUN: no target in {FOLDER}; make it with `python demo/fetch.py`")
    return load_target(TargetRecipe(path=str(FOLDER)))


@pytest.fixture(scope="module")
def batch(smollm2) -> TokenBatch:
    rows = [
        smollm2.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True
        )["input_ids"]
        for question in QUESTIONS
    ]
    ids = torch.tensor([i for row in rows for i in row])
    return TokenBatch(
        input_ids=ids,
        loss_mask=torch.zeros(len(ids), dtype=torch.bool),
        offsets=torch.tensor([0, *map(len, rows)]).cumsum(0),
        sample_ids=tuple(f"q{i}" for i in range(len(rows))),
    )


def test_self_check_of_the_real_target(smollm2, batch):
    self_check(smollm2, batch, default_taps(smollm2.spec.num_layers, 5))


def test_the_real_target_answers_from_its_captured_state(smollm2, batch):
    """The next token by lm_head(last) starts the answer that greedy generation gives."""
    features = smollm2.capture(batch, (1,), last=True)
    ends = (batch.offsets[1:] - 1).tolist()
    predicted = smollm2.head.logits(features.last[ends]).argmax(-1).tolist()
    for n, token in enumerate(predicted):
        prompt = batch.input_ids[batch.offsets[n] : batch.offsets[n + 1]][None]
        answer = smollm2.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1, do_sample=False
        )
        assert answer[0, -1] == token
