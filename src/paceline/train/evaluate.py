"""Simulated τ on validation samples: no generation, the same anchors at every evaluation."""

from collections.abc import Sequence

from paceline.decode.simulate import accepted_depths
from paceline.drafter.dflash import DFlash
from paceline.features.reader import FeatureReader
from paceline.objective.blocks import sample_anchors
from paceline.target.head import TargetHead

BUDGETS = (16, 64)


def simulated_tau(
    drafter: DFlash,
    head: TargetHead,
    reader: FeatureReader,
    indices: Sequence[int],
    *,
    anchors: int,
    seed: int,
) -> dict[str, float]:
    """Mean tokens per verification at uniformly drawn anchors, by method.

    Uniform anchors over-estimate a little: decoding visits an anchor after a rejection. The
    score's numbers come from decoding.
    """
    was_training = drafter.training
    drafter.eval()
    depths: dict[str, list[int]] = {}
    for index in indices:
        features = reader.read(index)
        tokens = features.tokens
        drawn = sample_anchors(
            tokens.loss_mask, anchors, seed=seed, epoch=-1, sample_id=tokens.sample_ids[0]
        )
        if not drawn.numel():
            continue
        device = drafter.fc.weight.device
        found = accepted_depths(
            drafter,
            head,
            features.taps.to(device),
            tokens.input_ids.to(device),
            tokens.loss_mask.to(device),
            drawn.to(device),
            BUDGETS,
        )
        for method, values in found.items():
            depths.setdefault(method, []).extend(values)
    drafter.train(was_training)
    return {m: 1.0 + sum(v) / len(v) for m, v in depths.items()}
