"""Eight sequences, learned by heart: then a chain must fill nearly every block.

What it proves is that labels, positions, masks, features and cache mean the same thing in training
and in decoding: any disagreement shows as a low τ however small the loss is.
"""

import time
from pathlib import Path
from typing import Any

import torch

from paceline.decode.speculate import decode_plain, decode_speculative
from paceline.drafter.build import drafter_config, new_drafter
from paceline.recipe.objective_inputs import objective_of
from paceline.recipe.schema import DrafterRecipe, TargetRecipe, TrainRecipe
from paceline.target.load import Target, load_target
from paceline.target.taps import default_taps
from paceline.train.batch import Anchored, pack
from paceline.train.objective import block_loss
from paceline.train.optimizer import build_optimizer, set_learning_rate
from paceline.train.schedule import rate_factor
from paceline.types import Features, TokenBatch

TARGET = Path(__file__).resolve().parents[1] / ".cache" / "smollm2"
QUESTIONS = (
    "Write a story about a lighthouse keeper and a whale.",
    "Explain how a bicycle stays upright.",
    "List ten animals and say one thing about each of them.",
    "Describe a market in the morning.",
    "How does bread rise?",
    "Give me advice on learning to play the violin.",
    "Tell me about the history of the printing press.",
    "What should I see on a trip through Norway?",
)
BLOCK, LAYERS, ANSWER, STEPS, ANCHORS = 8, 3, 64, 260, 10
LEARNING_RATE = 1e-3
TARGET_TAU = 6.4


def measure() -> dict[str, Any]:
    """Train on the target's greedy answers to eight questions, then decode the same prompts."""
    torch.set_num_threads(1)
    started = time.process_time()
    target = load_target(TargetRecipe(path=str(TARGET)))
    spec = target.spec
    eos = frozenset(spec.eos_token_ids)
    taps = default_taps(spec.num_layers, 3)
    recipe = DrafterRecipe(layers=LAYERS, block_size=BLOCK)
    config = drafter_config(
        recipe, spec, taps, mask_token_id=_unused(target), template_digest="", template_args={}
    )
    drafter = new_drafter(config, recipe, spec, target.folder, seed=0)
    prompts = [_prompt(target, question) for question in QUESTIONS]
    answers = [
        decode_plain(target, p, taps=taps, max_new_tokens=ANSWER + BLOCK, eos_ids=eos)
        for p in prompts
    ]
    samples = [
        _sample(prompt, answer.ids[: answer.features.shape[0] - len(prompt)], answer.features, taps)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    loss = _learn(target, drafter, samples)
    rounds = []
    drafter.eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        decoded = decode_speculative(
            target, drafter, target.head, prompt, max_new_tokens=ANSWER, eos_ids=eos
        )
        if decoded.ids != answer.ids[:ANSWER]:
            raise AssertionError("speculative output is not the plain output")
        rounds += decoded.rounds[:-1]
    tau = sum(rounds) / len(rounds)
    shortest = min(len(answer.ids) for answer in answers)
    return {
        "name": "overfit",
        "value": round(tau, 3),
        "unit": "tokens per verification",
        "target": TARGET_TAU,
        "ok": tau >= TARGET_TAU and shortest >= ANSWER,
        "how": f"block {BLOCK}, {LAYERS} layers, {len(QUESTIONS)} sequences with answers of "
        f"{shortest} tokens or more, {STEPS} steps, last loss {loss:.4f}, chain decoded over the "
        f"first {ANSWER} tokens, last round of each excluded; "
        f"{time.process_time() - started:.0f} CPU-seconds",
    }


def _learn(target: Target, drafter: Any, samples: list[Features]) -> float:
    recipe = TrainRecipe(learning_rate=LEARNING_RATE, gamma=4.0)
    optimizer = build_optimizer(drafter.train(), recipe)
    generator = torch.Generator().manual_seed(0)
    mean = 0.0
    for step in range(STEPS):
        group = [_anchored(sample, generator) for sample in samples]
        batch = pack(
            group,
            block_size=BLOCK,
            mask_token_id=drafter.config.mask_token_id,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        loss = block_loss(drafter, target.head, batch, objective_of(recipe), chunk=1 << 24)
        (loss.sum / loss.count).backward()
        mean = float(loss.sum.detach()) / loss.count
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        factor = rate_factor(
            (step + 0.5) / STEPS, schedule="cosine", warmup=0.05, decay=1.0, floor=0.02
        )
        set_learning_rate(optimizer, LEARNING_RATE * factor)
        optimizer.step()
        optimizer.zero_grad()
    return mean


def _anchored(sample: Features, generator: torch.Generator) -> Anchored:
    candidates = torch.nonzero(sample.tokens.loss_mask).flatten()[:-1]
    drawn = torch.randperm(candidates.numel(), generator=generator)[:ANCHORS]
    return Anchored(features=sample, anchors=candidates[drawn].sort().values)


def _sample(
    prompt: list[int], answer: tuple[int, ...], taps: torch.Tensor, layer_ids: tuple[int, ...]
) -> Features:
    ids = torch.tensor([*prompt, *answer])
    tokens = TokenBatch(
        input_ids=ids,
        loss_mask=torch.arange(ids.numel()) >= len(prompt),
        offsets=torch.tensor([0, ids.numel()]),
        sample_ids=(f"{int(ids.sum()):032x}",),
    )
    return Features(tokens=tokens, taps=taps[: ids.numel()], last=None, layer_ids=layer_ids)


def _prompt(target: Target, question: str) -> list[int]:
    turns = [{"role": "user", "content": question}]
    return target.tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_dict=False
    )


def _unused(target: Target) -> int:
    """A special token of the target that neither ends nor begins anything."""
    taken = {*target.spec.eos_token_ids, target.spec.bos_token_id, target.spec.pad_token_id}
    return max(i for i in target.tokenizer.added_tokens_decoder if i not in taken)
