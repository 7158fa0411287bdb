"""Sentences on how a training ended."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from paceline.drafter.dflash import DFlash
from paceline.recipe.checkpoints import CHOOSING
from paceline.recipe.run_dir import RunDir
from paceline.recipe.stage import read_record
from paceline.train.checkpoint import TrainState


def choice(best: Path, tau: Mapping[str, float]) -> str:
    """Which checkpoint is the drafter, and by what it was chosen; `tau` is its own, by method."""
    if CHOOSING not in tau:
        return f"drafter: {best}, the newest: there are no validation samples to choose by"
    shown = ", ".join(f"{method} {value:.3f}" for method, value in tau.items())
    return f"drafter: {best}, the best by simulated τ of {CHOOSING} ({shown})"


def left_out(set_aside: int) -> tuple[str, ...]:
    """What was not done where samples were set aside; nothing where none was."""
    if not set_aside:
        return ()
    samples = "1 sample was" if set_aside == 1 else f"{set_aside} samples were"
    told = "events/train.jsonl names them and the reasons (`quarantined`)."
    return (
        f"{samples} left out, each time its turn came: no target could make its states. {told}",
    )


def worse(run_dir: RunDir, state: TrainState, tau: Mapping[str, float]) -> Iterator[str]:
    """A sentence where the best checkpoint, of this `tau`, is below where the training began.

    None where `--allow-change` had later evaluations use other samples or anchors.
    """
    first = state.first_tau
    if CHOOSING not in tau or CHOOSING not in first:
        return
    record = read_record(run_dir.checkpoints, "train")
    if record and any(o.key.startswith("train.eval_") for o in record.overrides):
        return
    # As they are shown: a smaller difference is none that evaluations can tell.
    before, now = f"{first[CHOOSING]:.3f}", f"{tau[CHOOSING]:.3f}"
    if float(now) < float(before):
        yield (
            f"simulated τ {CHOOSING} was {before} before the first step and is {now} at "
            "the best checkpoint: training made it worse. Lower train.learning_rate."
        )


def nothing_learned(run_dir: RunDir, state: TrainState, drafter: DFlash) -> str:
    """Why a training without a single label cannot be called one, and where to look."""
    outside = (
        ""
        if drafter.vocabulary is None
        else f" Or the draft vocabulary ({len(drafter.vocabulary):,} tokens, drafter.draft_vocab) "
        "has none of the answers' tokens."
    )
    return (
        f"{run_dir.features}: none of the {state.samples} samples trained on had a token to learn "
        "from, so the drafter is as it was. Look at the loss masks (`paceline prepare --preview`): "
        f"a sample needs two supervised tokens in a row.{outside}"
    )
