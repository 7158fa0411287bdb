"""The golden check that runs before a job: what is captured is what is meant."""

from typing import Any

import torch

from paceline.durable.errors import TargetError
from paceline.target.load import Target
from paceline.types import Features, TokenBatch

_SAMPLES, _TOKENS, _PIECE = 4, 64, 24

RELATIVE_L2 = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""How far a row may be from the same row of another forward pass, by compute type: kernels round
otherwise with other neighbours in the batch."""


@torch.no_grad()
def self_check(
    target: Target, batch: TokenBatch, taps: tuple[int, ...], *, chunk_tokens: int | None = None
) -> None:
    """Compare a capture with the model's own hidden states and logits.

    The first samples of `batch`, cut short, are captured together (padding included) and then
    run by the model one by one, with all hidden states and logits. Tap i has to be
    `hidden_states[i + 1]`, and lm_head(last) has to reproduce the model's argmax, but for
    tokens whose two best logits are a rounding apart (docs/algorithms.md, "Pitfalls", 7). With
    `chunk_tokens` they are captured a second time in pieces, so short that there are several.

    Raises TargetError that names what differs, and where.
    """
    sample = _head_of(batch)
    captures = {"": target.capture(sample, taps, last=True)}
    if chunk_tokens is not None:
        pieces = min(chunk_tokens, _PIECE)
        captures[" in pieces"] = target.capture(sample, taps, last=True, chunk_tokens=pieces)
    bounds = sample.offsets.tolist()
    is_told = False
    for name, start, end in zip(sample.sample_ids, bounds, bounds[1:], strict=False):
        ids = sample.input_ids[start:end].to(target.device)[None]
        output = target.model(ids, output_hidden_states=True, use_cache=False)
        for how, features in captures.items():
            if not torch.equal(features.tokens.input_ids, sample.input_ids):
                raise TargetError(
                    f"self-check{how}: the token ids processed are not those that were asked for."
                )
            _check_sample(target, features, output, slice(start, end), f"sample {name}{how}")
        is_told |= bool(_is_finite(output.hidden_states[-1][0]).any())
    if not is_told:
        raise TargetError(
            f"self-check: the target's hidden states are not finite in {target.model.dtype}, in "
            "any sample that was tried. Set target.dtype to a type of wider range."
        )


def _check_sample(target: Target, features: Features, output: Any, rows: slice, name: str) -> None:
    tolerance = RELATIVE_L2[features.taps.dtype]
    for slot, layer in enumerate(features.layer_ids):
        _compare(
            features.taps[rows, slot],
            output.hidden_states[layer + 1][0].cpu(),
            tolerance,
            f"{name}, tap {layer}",
        )
    if features.last is None:
        raise TargetError("self-check: the capture gave no last hidden state.")
    last = features.last[rows]
    _compare(last, output.hidden_states[-1][0].cpu(), tolerance, f"{name}, last hidden state")
    logits = target.head.logits(last.to(target.device)).float()
    _same_argmax(logits, output.logits[0].float(), tolerance, name)


def _head_of(batch: TokenBatch) -> TokenBatch:
    count = min(_SAMPLES, len(batch))
    bounds = batch.offsets.tolist()
    spans = [slice(bounds[n], min(bounds[n] + _TOKENS, bounds[n + 1])) for n in range(count)]
    lengths = torch.tensor([0, *(s.stop - s.start for s in spans)], dtype=torch.int64)
    return TokenBatch(
        input_ids=torch.cat([batch.input_ids[s] for s in spans]),
        loss_mask=torch.cat([batch.loss_mask[s] for s in spans]),
        offsets=lengths.cumsum(0),
        sample_ids=batch.sample_ids[:count],
    )


def _compare(got: torch.Tensor, wanted: torch.Tensor, tolerance: float, what: str) -> None:
    difference = (got.float() - wanted.float()).norm(dim=-1)
    relative = difference / wanted.float().norm(dim=-1).clamp_min(1e-12)
    # A sample that the model itself makes no numbers of says nothing: extracting it tells of it.
    relative = relative.where(_is_finite(wanted) | _is_finite(got), 0.0)
    worst = int(relative.nan_to_num(nan=torch.inf).argmax())
    if not relative[worst] <= tolerance:
        raise TargetError(
            f"self-check: {what}, token {worst}: the captured vector is {relative[worst]:.3g} "
            f"(relative L2) away from the model's own; {tolerance:g} is allowed."
        )


def _is_finite(states: torch.Tensor) -> torch.Tensor:
    """Of each row."""
    return torch.isfinite(states).all(dim=-1)


def _same_argmax(got: torch.Tensor, wanted: torch.Tensor, tolerance: float, name: str) -> None:
    best = wanted.topk(2, dim=-1).values
    decided = best[:, 0] - best[:, 1] > tolerance * wanted.abs().amax(-1)
    wrong = (decided & (got.argmax(-1) != wanted.argmax(-1))).nonzero().flatten()
    if wrong.numel():
        at = int(wrong[0])
        raise TargetError(
            f"self-check: {name}, token {at}: lm_head(last) prefers "
            f"{int(got[at].argmax())}, the model {int(wanted[at].argmax())} "
            f"({wrong.numel()} of {len(got)} tokens differ)."
        )
