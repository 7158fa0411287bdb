"""CPU time of one training step of a small DFlash drafter, on one thread.

Forward, backward, gradient clipping and AdamW, with the functions that the trainer itself calls.
The parts are timed apart as well, so that a slower step says where.
"""

import time
from typing import Any

import torch

from paceline.drafter.config import DrafterConfig
from paceline.drafter.dflash import DFlash
from paceline.recipe.objective_inputs import objective_of
from paceline.recipe.schema import TrainRecipe
from paceline.target.families import NormKind
from paceline.target.head import TargetHead
from paceline.train.batch import anchor_sample, pack
from paceline.train.objective import block_loss
from paceline.train.optimizer import build_optimizer
from paceline.types import Features, TokenBatch

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, TAPS = 256, 768, 4, 2, 64, 2, 3
VOCABULARY, SEQUENCE, ANCHORS, BLOCK = 4096, 512, 64, 16
WARM_UP, STEPS = 5, 40
TARGET_SECONDS = 0.32


def measure() -> dict[str, Any]:
    """Median CPU seconds of a step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    recipe = TrainRecipe(anchors=ANCHORS, learning_rate=1e-4)
    drafter = _drafter().train()
    head = _head()
    sample = anchor_sample(_features(), count=ANCHORS, seed=0, epoch=0)
    optimizer = build_optimizer(drafter, recipe)
    parameters = list(drafter.parameters())
    steps: list[dict[str, float]] = []
    for _ in range(WARM_UP + STEPS):
        marks = [time.process_time()]
        batch = pack(
            [sample],
            block_size=BLOCK,
            mask_token_id=VOCABULARY - 1,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        loss = block_loss(drafter, head, batch, objective_of(recipe), chunk=recipe.loss_chunk)
        marks.append(time.process_time())
        loss.sum.backward()
        marks.append(time.process_time())
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(loss.count)
        torch.nn.utils.clip_grad_norm_(parameters, recipe.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.process_time())
        names = ("forward", "backward", "update")
        parts = {n: b - a for n, a, b in zip(names, marks, marks[1:], strict=False)}
        steps.append(parts | {"all": marks[-1] - marks[0]})
    steps = steps[WARM_UP:]
    median = {name: sorted(s[name] for s in steps)[STEPS // 2] for name in steps[0]}
    least = min(s["all"] for s in steps)
    shares = ", ".join(f"{n} {v:.3f}" for n, v in median.items() if n != "all")
    return {
        "name": "dflash_step",
        "value": round(median["all"], 4),
        "unit": "CPU-seconds",
        "target": TARGET_SECONDS,
        "ok": median["all"] <= TARGET_SECONDS,
        "how": (
            f"median of {STEPS} steps, one thread, float32 ({shares}; least {least:.3f}): hidden "
            f"{HIDDEN}, FFN {FFN}, {HEADS} heads, {KV_HEADS} key-value heads of {HEAD_DIM}, "
            f"{LAYERS} layers, {TAPS} taps, vocabulary {VOCABULARY}, {SEQUENCE} tokens, the first "
            f"quarter not trainable, {ANCHORS} anchors of {BLOCK}"
        ),
    }


def _drafter() -> DFlash:
    config = DrafterConfig(
        algorithm="dflash",
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 1e6},
        max_position=4096,
        vocab_size=VOCABULARY,
        block_size=BLOCK,
        mask_token_id=VOCABULARY - 1,
        taps=tuple(range(1, TAPS + 1)),
    )
    return DFlash(config)


def _head() -> TargetHead:
    weight = torch.randn(VOCABULARY, HIDDEN) * 0.02
    return TargetHead(
        embedding=weight,
        lm_head=weight,
        norm_weight=torch.ones(HIDDEN),
        norm_kind=NormKind.WEIGHT,
        eps=1e-6,
    )


def _features() -> Features:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY - 1, (SEQUENCE,), generator=generator)
    return Features(
        tokens=TokenBatch(
            input_ids=ids,
            loss_mask=torch.arange(SEQUENCE) >= SEQUENCE // 4,
            offsets=torch.tensor([0, SEQUENCE]),
            sample_ids=("dflash-step",),
        ),
        taps=torch.randn(SEQUENCE, TAPS, HIDDEN, generator=generator).to(torch.bfloat16),
        last=None,
        layer_ids=tuple(range(1, TAPS + 1)),
    )
