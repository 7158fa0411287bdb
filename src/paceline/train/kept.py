"""Which checkpoints stay, and which of them is the training's result."""

import logging
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from paceline.durable.errors import DataError
from paceline.recipe.checkpoints import EVALUATION, list_checkpoints, rank, read_evaluation
from paceline.train.checkpoint import damage, intact_checkpoints, read_state

_LOG = logging.getLogger(__name__)


class KeptCheckpoints:
    """The whole checkpoints of a training at work.

    Their bytes are read when the training starts, and those of the best one when it ends: a
    checkpoint of gigabytes is not read again at every evaluation.
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        *,
        every: int | None = None,
        fingerprints: Collection[str],
        verified: Path | None,
    ) -> None:
        """Verifies all but the `verified` one; `keep` of the newest stay beside the best.

        So does that of every `every`-th evaluation. A checkpoint of another training, by its
        fingerprint, is neither counted nor removed.
        """
        self._keep, self._every = keep, every
        states = {f: read_state(f) for f in intact_checkpoints(root, verified=verified)}
        self._taus = {f: s.tau for f, s in states.items() if s.fingerprint in fingerprints}
        for folder in filter(_is_unclear, self._taus):
            _LOG.warning(
                "%s: not the evaluation that was written; the checkpoint counts as not evaluated",
                folder / EVALUATION,
            )

    def add(self, folder: Path, tau: dict[str, float]) -> None:
        """Take in one that was just written, as the newest, and remove what need not stay."""
        self._taus.pop(folder, None)
        self._taus[folder] = tau
        best = max(self._taus, key=lambda f: rank(f, self._taus[f]))
        for other in list(self._taus)[: -self._keep]:
            if other != best and not self._is_for_good(other):
                del self._taus[other]
                _remove(other)

    def _is_for_good(self, folder: Path) -> bool:
        if self._every is None:
            return False
        evaluation = read_evaluation(folder)
        if evaluation is None:
            return _is_unclear(folder)
        return evaluation.number % self._every == 0


def _is_unclear(folder: Path) -> bool:
    """Whether an evaluation stands there and cannot be told."""
    return (folder / EVALUATION).exists() and read_evaluation(folder) is None


def best_checkpoint(root: Path, fingerprints: Collection[str]) -> Path:
    """The whole checkpoint of highest simulated τ; of equal ones, or without any, the newest.

    Only of those that carry one of the `fingerprints` of a training. Reads every byte of it, and
    of a damaged one that would come before it. Raises DataError where none is whole.
    """
    for folder in _by_rank(root, fingerprints):
        problem = damage(folder)
        if not problem:
            return folder
        _LOG.warning("%s It is left out of the choice of the best checkpoint", problem)
    raise DataError(f"{root}: no intact checkpoint. Run `paceline train` again.")


def _by_rank(root: Path, fingerprints: Collection[str]) -> Iterator[Path]:
    """Best first, by what the state files say: whether that is true, a checksum has to tell."""
    found = {}
    for checkpoint in list_checkpoints(root):
        if checkpoint.fingerprint in fingerprints:
            found[root / checkpoint.name] = checkpoint.tau
        else:
            _LOG.warning(
                "%s: of another training, left out of the choice of the best checkpoint",
                root / checkpoint.name,
            )
    yield from sorted(found, key=lambda f: rank(f, found[f]), reverse=True)


def _remove(folder: Path) -> None:
    # Renamed first: a folder that is being removed must not look like a checkpoint.
    doomed = folder.with_name(folder.name + ".partial")
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return  # Removed by hand.
    shutil.rmtree(doomed)
