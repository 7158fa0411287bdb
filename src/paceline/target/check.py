"""The golden check that runs before a job: what is captured is what is meant."""

import torch

from paceline.durable.errors import TargetError
from paceline.target.load import Target
from paceline.types import TokenBatch

_SAMPLES, _TOKENS = 4, 64
_RELATIVE_L2 = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@torch.no_grad()
def self_check(target: Target, batch: TokenBatch, taps: tuple[int, ...]) -> None:
    """Compare a capture with the model's own hidden states and logits.

    The first samples of `batch`, cut short, are captured together (padding included) and then
    run by the model one by one, with all hidden states and logits. Tap i has to be
    `hidden_states[i + 1]`, and lm_head(last) has to reproduce the model's argmax, but for
    tokens whose two best logits are a rounding apart (docs/algorithms.md, "Pitfalls", 7).

    Raises TargetError that names what differs, and where.
    """
    sample = _head_of(batch)
    features = target.capture(sample, taps, last=True)
    if features.last is None:
        raise TargetError("self-check: the capture gave no last hidden state.")
    if not torch.equal(features.tokens.input_ids, sample.input_ids):
        raise TargetError("self-check: the token ids processed are not those that were asked for.")
    tolerance = _RELATIVE_L2[features.taps.dtype]
    bounds = sample.offsets.tolist()
    for name, start, end in zip(sample.sample_ids, bounds, bounds[1:], strict=False):
        ids = sample.input_ids[start:end].to(target.device)[None]
        output = target.model(ids, output_hidden_states=True, use_cache=False)
        for slot, layer in enumerate(taps):
            _compare(
                features.taps[start:end, slot],
                output.hidden_states[layer + 1][0].cpu(),
                tolerance,
                f"sample {name}, tap {layer}",
            )
        last = features.last[start:end]
        _compare(
            last, output.hidden_states[-1][0].cpu(), tolerance, f"sample {name}, last hidden state"
        )
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
    worst = int(relative.nan_to_num(nan=torch.inf).argmax())
    if not relative[worst] <= tolerance:
        raise TargetError(
            f"self-check: {what}, token {worst}: the captured vector is {relative[worst]:.3g} "
            f"(relative L2) away from the model's own; {tolerance:g} is allowed."
        )


def _same_argmax(got: torch.Tensor, wanted: torch.Tensor, tolerance: float, name: str) -> None:
    best = wanted.topk(2, dim=-1).values
    decided = best[:, 0] - best[:, 1] > tolerance * wanted.abs().amax(-1)
    wrong = (decided & (got.argmax(-1) != wanted.argmax(-1))).nonzero().flatten()
    if wrong.numel():
        at = int(wrong[0])
        raise TargetError(
            f"self-check: sample {name}, token {at}: lm_head(last) prefers "
            f"{int(got[at].argmax())}, the model {int(wanted[at].argmax())} "
            f"({wrong.numel()} of {len(got)} tokens differ)."
        )
