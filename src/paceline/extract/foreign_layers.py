"""What the states in a foreign cache are: whose layers they come from, and whether normed.

Tools count layers differently (docs/architecture.md, "Layer ids"). Their own defaults:

- SpecForge gives SGLang 1, L / 2 - 1 and L - 4 of L layers, each the output after that layer; its
  last state is normed.
- speculators has vLLM take 2, L / 2 and L - 3, each the input of that layer, and behind them L,
  the last layer's output before the final norm. Its older `.pt` files hold the outputs after 2,
  L / 2, L - 3 and L - 1, the last one un-normed in most versions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from paceline.durable.errors import UserError
from paceline.extract.foreign_files import ForeignSample, Kind, Shape

Convention = Literal["output-after", "input-of"]
Last = Literal["normed", "un-normed", "absent"]

_SHIFT: dict[Convention, int] = {"output-after": 0, "input-of": 1}
_CONVENTIONS: dict[Kind, Convention] = {
    "ckpt": "output-after",
    "safetensors": "input-of",
    "pt": "output-after",
}


@dataclass(frozen=True)
class Stated:
    """What the user says of a cache; None leaves it to the tool's defaults."""

    layers: tuple[int, ...] | None = None
    convention: Convention | None = None
    last: Last | None = None


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What the states of every file are."""

    shape: Shape
    """Each file has to have it."""

    layers: tuple[int, ...]
    """Ids of the first slots, as the tool counts."""

    convention: Convention
    last: Last

    @property
    def own_layers(self) -> tuple[int, ...]:
        """The same as output after layer i; -1 is the embedding."""
        return own_ids(self.layers, self.convention)

    def in_words(self) -> str:
        """For messages, as the flags have it."""
        return flags(self.layers, self.convention, self.last)

    def last_of(self, sample: ForeignSample) -> torch.Tensor | None:
        """The last state of a sample, [T, H]; None where it is absent."""
        if self.last == "absent":
            return None
        return sample.last if self.shape.has_last else sample.slots[-1]


@dataclass(frozen=True)
class Selection:
    """What is taken from each file."""

    slots: tuple[int, ...]
    """For each tap, in the order of the taps."""

    last: bool
    is_normed: bool
    """False: the final norm is still to be applied."""


def own_ids(layers: Sequence[int], convention: Convention) -> tuple[int, ...]:
    """Ids of a convention as output after layer i."""
    return tuple(layer - _SHIFT[convention] for layer in layers)


def foreign_ids(own: Sequence[int], convention: Convention) -> tuple[int, ...]:
    """The other way round."""
    return tuple(layer + _SHIFT[convention] for layer in own)


def flags(layers: Sequence[int], convention: Convention, last: Last) -> str:
    """The flags that state a meaning."""
    return f"--layers {','.join(map(str, layers))} --convention {convention} --last {last}"


def resolve(kind: Kind, shape: Shape, stated: Stated, num_layers: int) -> Meaning:
    """Put together what is stated and what the tool does by default.

    Raises UserError where that does not fit the files, or where they need more to be stated.
    """
    convention = stated.convention or _CONVENTIONS[kind]
    # Where the last state has no name of its own, it is the slot behind the others, with this id.
    last_id = num_layers - 1 + _SHIFT[convention]
    layers, last = stated.layers, stated.last
    slots = shape.slots
    if not slots:
        raise UserError(
            "the cache has the last hidden state alone, of no layer: it was made without "
            "`--enable-aux-hidden-states`. No features can be made of it."
        )
    if shape.has_last:
        last = last or "normed"
    elif last is None:
        is_without = layers is not None and len(layers) == slots and layers[-1] != last_id
        last = "absent" if is_without or kind == "ckpt" else "un-normed"
    elif kind == "ckpt" and last != "absent":
        raise UserError(f"--last {last}: the cache has no last hidden state.")
    named = slots - (last != "absent" and not shape.has_last)
    if layers is None:
        layers = _default_layers(kind, shape, named, num_layers, last)
    elif not shape.has_last and last != "absent" and len(layers) == slots and layers[-1] == last_id:
        layers = layers[:-1]
    _check_layers(layers, convention, num_layers)
    if len(layers) != named:
        behind = "" if named == slots else f", the last hidden state (--last {last}) among them"
        raise UserError(
            f"--layers names {len(layers)} layers, and the cache has {slots} states a "
            f"token{behind}. Name those that it was made with, in their order."
        )
    return Meaning(shape=shape, layers=layers, convention=convention, last=last)


def select(meaning: Meaning, taps: Sequence[int], *, last: bool) -> Selection:
    """Find the run's taps in the cache. Raises UserError where one is not there."""
    own = meaning.own_layers
    missing = [tap for tap in taps if tap not in own]
    if missing:
        has = ", ".join(map(str, (layer for layer in own if layer >= 0)))
        raise UserError(
            f"the run taps layers {_listed(taps)} (output after layer), and the cache has none of "
            f"{_listed(missing)}: by `{meaning.in_words()}` it has the outputs after {has}. State "
            "the layers that it was made with, or set extract.taps to some of these in a new run "
            "directory (`--run DIR`)."
        )
    if last and meaning.last == "absent":
        raise UserError(
            "the run keeps the last hidden state (extract.last), and the cache has none. Set "
            "extract.last to false in a new run directory (`--run DIR`), or extract anew."
        )
    return Selection(tuple(own.index(tap) for tap in taps), last, meaning.last == "normed")


def _default_layers(
    kind: Kind, shape: Shape, named: int, num_layers: int, last: Last
) -> tuple[int, ...]:
    middle = num_layers // 2
    if named == 3 and (kind != "ckpt" or shape.is_eagle3):
        own = (1, middle - 1, num_layers - 4)
        # The two of speculators are counted alike and mean different layers.
        return own if kind == "ckpt" else (2, middle, num_layers - 3)
    raise UserError(
        f"the cache has {named} states a token{'' if last == 'absent' else ' beside the last'}, "
        "and nothing in it says of which layers. Give --layers, such as --layers 1,9,17, as it "
        "was made with."
    )


def _check_layers(layers: Sequence[int], convention: Convention, num_layers: int) -> None:
    top = num_layers - 1 + _SHIFT[convention]
    if list(layers) != sorted(set(layers)):
        raise UserError(f"--layers {_listed(layers)}: must rise; engines keep them in that order.")
    if layers and not 0 <= layers[0] <= layers[-1] <= top:
        raise UserError(
            f"--layers {_listed(layers)}: with --convention {convention} the target has 0 to {top}."
        )


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


def chosen(
    sample: ForeignSample, meaning: Meaning, selection: Selection, tokens: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """What is taken of a sample's first `tokens` rows: `tap 0`, ..., and `last`."""
    for number, slot in enumerate(selection.slots):
        yield f"tap {number}", sample.slots[slot][:tokens]
    if selection.last:
        last = meaning.last_of(sample)
        assert last is not None, "`select` has looked"
        yield "last", last[:tokens]
