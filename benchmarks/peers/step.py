"""One training step beside that of speculators, in one process, on the same numbers.

Both have the same weights, inputs and anchors at every step, and take turns: forward, loss,
backward, clipping of the gradient and AdamW, all in float32 on one thread. What is measured of
speculators is its own model, loss (`eager`), attention (`sdpa`) and optimizer; nothing of it is
replaced. The two are brought to the same function by what each is given:

- *Labels*. It takes them from the target's logits, the argmax of lm_head over the stored last
  vector. That vector is made of the lm_head row of the next token, so the argmax is the data's own
  token, which is what Paceline learns.
- *Anchors*. It draws them inside its step; the draw is repeated here from the same seed, and
  Paceline takes them. They end a block before the end of the sequence.
- *Weights of slots*. `fixed-exp-decay`, exp(-(k - 1) / gamma): Paceline's default, not its own,
  which is D-PACE.
- *Mean*. It divides by the number of supervised slots, Paceline by the sum of their weights; here
  Paceline's gradient is divided by the number as well.
- *AdamW*. The same rate, betas and epsilon, and no weight decay.
"""

import importlib
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch

from paceline.drafter.config import DrafterConfig
from paceline.drafter.dflash import DFlash
from paceline.recipe.objective_terms import ObjectiveTerm
from paceline.recipe.schema import TrainRecipe
from paceline.target.families import NormKind
from paceline.target.head import TargetHead
from paceline.train.batch import Anchored, pack
from paceline.train.objective import block_loss
from paceline.train.optimizer import build_optimizer
from paceline.types import Features, TokenBatch

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, TAPS = 576, 1536, 9, 3, 64, 2, 3
VOCABULARY, SEQUENCE, ANCHORS, BLOCK = 49152, 512, 32, 16
ROPE_THETA, NORM_EPS, MASK = 1e5, 1e-5, VOCABULARY - 1
LOSS = ObjectiveTerm(kind="cross_entropy", positions="decay", gamma=7.0)
RATE, CLIP = 1e-4, 1.0
BETAS, ADAM_EPS = (0.9, 0.999), 1e-8
WARM_UP, ROUNDS = 2, 15
TARGET_RATIO, LOSS_TOLERANCE = 0.60, 1e-4
SPECFORGE_SECONDS = 0.54

Step = Callable[[int], float]
"""Takes the step's number, which seeds its anchors; returns its loss."""


def measure(rounds: str = str(ROUNDS)) -> list[dict[str, Any]]:
    """The ratio of CPU seconds, how far the losses are apart, and SpecForge's figure on record."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sides = dict(zip(("ours", "theirs"), _sides(), strict=True))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(WARM_UP + int(rounds)):
        # Taking turns in going first: neither always finds the other's data in the caches.
        for name in sorted(sides, reverse=bool(number % 2)):
            start = time.process_time()
            losses[name].append(sides[name](number))
            seconds[name].append(time.process_time() - start)
    median = {name: statistics.median(taken[WARM_UP:]) for name, taken in seconds.items()}
    least = {name: min(taken[WARM_UP:]) for name, taken in seconds.items()}
    ratio = median["ours"] / median["theirs"]
    apart = max(abs(a - b) for a, b in zip(losses["ours"], losses["theirs"], strict=True))
    theirs = losses["theirs"]
    version = metadata.version("speculators")
    return [
        {
            "name": "peers_step",
            "value": round(ratio, 4),
            "unit": "of the CPU-seconds of speculators",
            "target": TARGET_RATIO,
            "ok": ratio <= TARGET_RATIO and apart <= LOSS_TOLERANCE,
            "how": (
                f"medians of {rounds} steps in turns, one thread, float32: {median['ours']:.3f} "
                f"(least {least['ours']:.3f}) beside {median['theirs']:.3f} (least "
                f"{least['theirs']:.3f}) of speculators {version}: hidden {HIDDEN}, FFN {FFN}, "
                f"{HEADS} heads, {KV_HEADS} key-value heads of {HEAD_DIM}, {LAYERS} layers, {TAPS} "
                f"taps, vocabulary {VOCABULARY}, {SEQUENCE} tokens, the first quarter not "
                f"trainable, {ANCHORS} anchors of {BLOCK}"
            ),
        },
        {
            "name": "peers_step_loss",
            "value": round(apart, 8),
            "unit": "largest difference of two losses",
            "target": LOSS_TOLERANCE,
            "ok": apart <= LOSS_TOLERANCE,
            "how": f"over {len(theirs)} steps; its loss {theirs[0]:.4f} -> {theirs[-1]:.4f}",
        },
        {
            "name": "peers_step_specforge",
            "value": SPECFORGE_SECONDS,
            "unit": "CPU-seconds",
            "target": None,
            "ok": True,
            "how": "on record for the step of `make bench ONLY=dflash_step`; not measured here",
        },
    ]


def _sides() -> tuple[Step, Step]:
    ids = torch.randint(0, MASK, (SEQUENCE,))
    loss_mask = torch.arange(SEQUENCE) >= SEQUENCE // 4
    taps = torch.randn(SEQUENCE, TAPS, HIDDEN)
    head = torch.randn(VOCABULARY, HIDDEN) * 0.02
    drafter = DFlash(_config()).train()
    for parameter in drafter.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    theirs = _theirs(drafter, ids, loss_mask, taps, head)
    return _ours(drafter, ids, loss_mask, taps, head), theirs


def _ours(
    drafter: DFlash,
    ids: torch.Tensor,
    loss_mask: torch.Tensor,
    taps: torch.Tensor,
    lm_head: torch.Tensor,
) -> Step:
    recipe = TrainRecipe(learning_rate=RATE, betas=BETAS, eps=ADAM_EPS, weight_decay=0.0)
    head = TargetHead(
        embedding=lm_head,
        lm_head=lm_head,
        norm_weight=torch.ones(HIDDEN),
        norm_kind=NormKind.WEIGHT,
        eps=NORM_EPS,
    )
    features = Features(
        tokens=TokenBatch(
            input_ids=ids,
            loss_mask=loss_mask,
            offsets=torch.tensor([0, SEQUENCE]),
            sample_ids=("peers-step",),
        ),
        taps=taps,
        last=None,
        layer_ids=_config().taps,
    )
    optimizer = build_optimizer(drafter, recipe)
    parameters = list(drafter.parameters())

    def step(number: int) -> float:
        batch = pack(
            [Anchored(features=features, anchors=_anchors(number, loss_mask))],
            block_size=BLOCK,
            mask_token_id=MASK,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        loss = block_loss(drafter, head, batch, (LOSS,), chunk=recipe.loss_chunk)
        loss.sum.backward()
        rows = float(batch.valid.sum())
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(rows)
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.sum.detach()) / rows

    return step


def _theirs(
    drafter: DFlash,
    ids: torch.Tensor,
    loss_mask: torch.Tensor,
    taps: torch.Tensor,
    lm_head: torch.Tensor,
) -> Step:
    model = _their_model()
    frozen = {f"{name}.weight": lm_head for name in ("embed_tokens", "lm_head", "verifier_lm_head")}
    frozen["verifier_norm.weight"] = torch.ones(HIDDEN)
    model.load_state_dict({**drafter.state_dict(), **frozen})
    build = importlib.import_module("speculators.train.optimizers").build_optimizers
    # Its AdamW has torch's own betas and epsilon, those of BETAS and ADAM_EPS.
    (optimizer,) = build(model, SimpleNamespace(optimizer="adamw", lr=RATE, weight_decay=0.0))
    losses = importlib.import_module("speculators.losses")
    settings = {
        "loss_config": losses.resolve_loss_config("ce", "eager"),
        "gamma": LOSS.gamma,
        "max_anchors": ANCHORS,
        "per_position_loss_weight": "fixed-exp-decay",
    }
    last = lm_head[ids.roll(-1)]
    if not torch.equal((model.verifier_norm(last) @ lm_head.T).argmax(-1), ids.roll(-1)):
        raise AssertionError("the target's argmax is not the data's token: other labels than ours")
    batch = {
        "hidden_states": taps.flatten(1)[None],
        "input_ids": ids[None],
        "loss_mask": loss_mask[None].long(),
        "verifier_last_hidden_states": last[None],
        "document_ids": torch.zeros(1, SEQUENCE, dtype=torch.int64),
        "position_ids": torch.arange(SEQUENCE)[None],
    }

    def step(number: int) -> float:
        torch.manual_seed(number)
        _, loss, _ = model(**batch, **settings)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return float(loss.detach())

    return step


def _their_model() -> Any:
    layers = importlib.import_module("transformers").Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=NORM_EPS,
        rope_parameters=dict(_config().rope),
        layer_types=["full_attention"] * LAYERS,
        attn_implementation="sdpa",
    )
    dflash = importlib.import_module("speculators.models.dflash")
    config = dflash.DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=VOCABULARY,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=list(_config().taps),
        mask_token_id=MASK,
    )
    return dflash.DFlashDraftModel(config).train()


def _anchors(number: int, loss_mask: torch.Tensor) -> torch.Tensor:
    """What its step `number` draws, rising."""
    select = importlib.import_module("speculators.models.dflash.utils").select_anchors
    torch.manual_seed(number)
    anchors, valid = select(loss_mask[None], ANCHORS, BLOCK)
    return anchors[valid]


def _config() -> DrafterConfig:
    return DrafterConfig(
        algorithm="dflash",
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=NORM_EPS,
        rope={"rope_type": "default", "rope_theta": ROPE_THETA},
        max_position=4096,
        vocab_size=VOCABULARY,
        block_size=BLOCK,
        mask_token_id=MASK,
        taps=tuple(range(1, TAPS + 1)),
    )
