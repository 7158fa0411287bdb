"""Simulated τ on validation samples: no generation, the same anchors at every evaluation."""

from collections.abc import Iterable, Sequence

from paceline.decode.simulate import Observer, accepted_depths
from paceline.drafter.dflash import DFlash
from paceline.features.reader import FeatureReader
from paceline.objective.blocks import sample_anchors
from paceline.target.head import TargetHead

BUDGETS = (16, 64)


Depths = dict[str, list[int]]
"""Accepted depth at each anchor, by method."""


def simulated_tau(depths: Depths) -> dict[str, float]:
    """Mean tokens per verification at uniformly drawn anchors, by method.

    Uniform anchors over-estimate a little: decoding visits an anchor after a rejection. The
    score's numbers come from decoding.
    """
    return {method: 1.0 + sum(found) / len(found) for method, found in depths.items()}


def depths_at_anchors(
    drafter: DFlash,
    head: TargetHead,
    reader: FeatureReader,
    indices: Iterable[int],
    *,
    anchors: int,
    seed: int,
    temperatures: Sequence[float] | None = None,
    observers: Sequence[Observer] = (),
) -> Depths:
    """What a verification would accept at the same anchors of these samples as ever.

    `temperatures` and `observers` as in `accepted_depths`: with a `SlotTally`, the same pass gives
    coverage and calibration error by depth.
    """
    was_training = drafter.training
    drafter.eval()
    depths: Depths = {}
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
            temperatures=temperatures,
            observers=observers,
        )
        for method, values in found.items():
            depths.setdefault(method, []).extend(values)
    drafter.train(was_training)
    return depths
