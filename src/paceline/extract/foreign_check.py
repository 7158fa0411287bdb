"""Imported states against the target's own: a wrong convention is named before anything is kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from paceline.durable.errors import TargetError
from paceline.extract.foreign_files import Cache, ForeignSample, read_sample
from paceline.extract.foreign_layers import (
    Convention,
    Last,
    Meaning,
    Selection,
    chosen,
    flags,
    foreign_ids,
    own_ids,
)
from paceline.extract.job import Rechecked
from paceline.extract.recheck import capture_tolerance, relative_l2
from paceline.extract.setting import Setting
from paceline.target.capture import CapturePlan
from paceline.target.load import Target
from paceline.target.transfer import HostCopies
from paceline.types import TokenBatch
from paceline.types.rows import read_rows
from paceline.types.sample import batch_of

_TOKENS = 64
"""Of a sample that differs, to find out why: all layers are captured, so it is kept short."""

_NEAR = 0.15
"""Relative L2 at which a state is the right one, computed in a coarser type; the states of
neighbouring layers are further apart."""

_CONVENTIONS: tuple[Convention, ...] = ("output-after", "input-of")


@dataclass(frozen=True)
class ToCheck:
    """A sample and the file that holds it."""

    position: int
    """Where its line begins in the corpus."""

    file: int


class ForeignCheck:
    """Compares files with captures of the run's own target."""

    def __init__(
        self, target: Target, setting: Setting, cache: Cache, meaning: Meaning, pick: Selection
    ) -> None:
        self._target, self._setting, self._cache = target, setting, cache
        self._meaning, self._pick = meaning, pick
        self._allowed = capture_tolerance(setting.recipe.target.dtype, setting.layout.dtype)

    def run(self, samples: Sequence[ToCheck]) -> tuple[Rechecked, ...]:
        """Compare each. Raises TargetError that says what the states are, where that shows, and
        Unreadable for a file that cannot be read.
        """  # noqa: D205
        return tuple(map(self._check, samples))

    def _check(self, sample: ToCheck) -> Rechecked:
        layout, recipe = self._setting.layout, self._setting.recipe
        batch = batch_of(read_rows(self._setting.source, [sample.position]))
        file = self._cache.files[sample.file]
        found = read_sample(file, self._cache.kind, layout.hidden_size)
        rest = getattr(torch, layout.dtype)
        plan = CapturePlan(layout.layer_ids, layout.last, recipe.extract.chunk_tokens, rest)
        own = self._target.start_capture(batch, plan, HostCopies(self._target.device)).wait()
        exact, tokens = True, batch.input_ids.numel()
        away = torch.zeros(tokens)
        for number, (name, states) in enumerate(chosen(found, self._meaning, self._pick, tokens)):
            wanted = own.last if name == "last" else own.taps[:, number]
            assert wanted is not None, "captured with what is chosen"
            if name == "last" and not self._pick.is_normed:
                states = self._normed(states)
            states = states.to(rest)
            exact = exact and torch.equal(states, wanted)
            away = torch.maximum(away, _away(states, wanted))
        if float(away.max()) > self._allowed:
            self._explain(file, found, batch, away)
        return Rechecked(batch.sample_ids[0], exact=exact, relative_l2=float(away.max()))

    def _normed(self, states: torch.Tensor) -> torch.Tensor:
        compute = getattr(torch, self._setting.recipe.target.dtype)
        return self._target.head.norm(states.to(self._target.device, compute)).cpu()

    def _explain(
        self, file: Path, found: ForeignSample, batch: TokenBatch, away: torch.Tensor
    ) -> NoReturn:
        """Say what the states of this file are; `away` says of each token how far it is, [T]."""
        meaning, wrong = self._meaning, int((away > self._allowed).sum())
        lead = (
            f"{file}: its states are not those of sample {batch.sample_ids[0]} as "
            f"`{meaning.in_words()}` has it: {wrong} of {len(away)} tokens differ, by up to "
            f"{float(away.max()):.3g} (relative L2; {self._allowed:.2g} is allowed). Nothing was "
            "imported."
        )
        if 2 * wrong < len(away):
            raise TargetError(
                f"{lead} The others agree, so the flags are right and those tokens are not: an "
                "engine's prefix cache or chunks can do that. Extract anew, or leave the file out."
            )
        short = _head_of(batch)
        layers = tuple(range(self._setting.spec.num_layers - 1))
        own = self._target.capture(short, layers, last=True)
        tokens = short.input_ids.numel()
        kept = _Distances(own.taps, [slot[:tokens] for slot in found.slots])
        own_layers, of_layers = self._which_layers(kept)
        if own_layers is None:
            raise TargetError(
                f"{lead} They are not the outputs of this target's layers in any convention: the "
                "cache was made with other weights, or by another target. Give the target that it "
                "was made with, or extract anew."
            )
        last, of_last = self._which_last(found, own.last, tokens)
        what = f"They are the outputs after layers {', '.join(map(str, own_layers))}"
        match last:
            case None:
                what += ", and the last one is neither before nor after this target's final norm"
            case "normed" | "un-normed" if self._pick.last:
                what += (
                    f", and the last one is {'after' if last == 'normed' else 'before'} the norm"
                )
        advice = "" if self._is_as_stated(own_layers, last) else self._flags(own_layers, last)
        if max(of_layers, of_last) > self._allowed:
            advice += self._coarser()
        raise TargetError(f"{lead} {what}.{advice}")

    def _is_as_stated(self, own: Sequence[int], last: Last | None) -> bool:
        return tuple(own) == self._meaning.own_layers and last == self._meaning.last

    def _which_layers(self, kept: "_Distances") -> tuple[tuple[int, ...] | None, float]:
        """Own ids of the slots that `--layers` names, and how far they are at most.

        None where they are none of the target's.
        """
        meaning = self._meaning
        # As stated first, then by the other convention, then whatever fits.
        for convention in (meaning.convention, *_CONVENTIONS):
            own = own_ids(meaning.layers, convention)
            distance = kept.of(own)
            if distance is not None and distance <= self._allowed:
                return own, distance
        nearest = kept.nearest(len(meaning.layers))
        distance = kept.of(nearest) or 0.0
        is_one = distance <= _NEAR and list(nearest) == sorted(set(nearest))
        return (nearest if is_one else None), distance

    def _which_last(
        self, found: ForeignSample, own: torch.Tensor | None, tokens: int
    ) -> tuple[Last | None, float]:
        """What the last state is, and how far it is; None where it is neither."""
        last = self._meaning.last_of(found)
        if not self._pick.last or last is None or own is None:
            return self._meaning.last, 0.0
        last = last[:tokens]
        normed = float(_away(last, own).median())
        un_normed = float(_away(self._normed(last), own).median())
        if min(normed, un_normed) > _NEAR:
            return None, 0.0
        return ("normed", normed) if normed <= un_normed else ("un-normed", un_normed)

    def _flags(self, own: Sequence[int], last: Last | None) -> str:
        """What to give: the ids as they were, where a convention fits them."""
        meaning = self._meaning
        layers, by = foreign_ids(own, meaning.convention), meaning.convention
        for convention in _CONVENTIONS:
            if own_ids(meaning.layers, convention) == tuple(own):
                layers, by = meaning.layers, convention
        more = ""
        if last is None:
            more = " That serves a run that does not keep extract.last; another extracts anew."
        return f" Give `{flags(layers, by, last or 'absent')}`.{more}"

    def _coarser(self) -> str:
        return (
            f" The target computes in {self._setting.recipe.target.dtype} here (target.dtype), and "
            "the cache was made in a coarser type, or with other kernels, than that allows: set "
            "target.dtype to the type that it was made in, in a new run directory (`--run DIR`), "
            "or extract anew."
        )


class _Distances:
    """How far each slot of a file is from each layer's output, as the median over tokens."""

    def __init__(self, own: torch.Tensor, slots: Sequence[torch.Tensor]) -> None:
        self._table = torch.stack(
            [
                torch.stack([_away(slot, own[:, layer]).median() for layer in range(own.shape[1])])
                for slot in slots
            ]
        )

    def nearest(self, named: int) -> tuple[int, ...]:
        """For each of the first `named` slots."""
        return tuple(self._table[:named].argmin(dim=1).tolist())

    def of(self, own: Sequence[int]) -> float | None:
        """The largest, where the slots are these layers' outputs.

        The embedding and the last layer are passed by; None where there is nothing else.
        """
        layers = self._table.shape[1]
        known = [(slot, layer) for slot, layer in enumerate(own) if 0 <= layer < layers]
        return max((float(self._table[pair]) for pair in known), default=None)


def _away(states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return relative_l2(states.float(), wanted.float())


def _head_of(batch: TokenBatch) -> TokenBatch:
    tokens = min(_TOKENS, batch.input_ids.numel())
    return TokenBatch(
        input_ids=batch.input_ids[:tokens],
        loss_mask=batch.loss_mask[:tokens],
        offsets=torch.tensor([0, tokens]),
        sample_ids=batch.sample_ids,
    )
