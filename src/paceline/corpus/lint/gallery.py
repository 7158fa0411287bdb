"""The samples that the page shows: some of each source, and those at the ends of each scale."""

from collections import defaultdict
from dataclasses import dataclass

from paceline.corpus.lint.lowest import Lowest
from paceline.types import Sample

_ANY = 16
_OF_EACH_SOURCE = 2
_OF_EACH_END = 2
ENDS = ("longest", "shortest", "least trained", "most trained")
"""The ends of the scales."""

_AT_ENDS = _OF_EACH_END * len(ENDS)

MOST = 240
"""Samples in all, however many sources there are."""


@dataclass(frozen=True)
class Chosen:
    """A sample to show."""

    sample: Sample
    labels: tuple[str, ...]
    """What it stands for, beyond itself."""


class Gallery:
    """Chooses from a stream by the hash in a sample's id, so no order of rows matters."""

    def __init__(self) -> None:
        self._any = Lowest[Sample](_ANY)
        self._sources: dict[str, Lowest[Sample]] = defaultdict(lambda: Lowest(_OF_EACH_SOURCE))
        self._ends = {name: Lowest[Sample](_OF_EACH_END) for name in ENDS}

    def add(self, sample: Sample) -> None:
        """Offer a sample."""
        key, length = sample.sample_id, len(sample.input_ids)
        self._any.add(key, sample)
        self._sources[sample.source].add(key, sample)
        self._ends["longest"].add((-length, key), sample)
        self._ends["shortest"].add((length, key), sample)
        if sample.loss_spans:
            share = sample.num_loss_tokens / length
            self._ends["least trained"].add((share, key), sample)
            self._ends["most trained"].add((-share, key), sample)

    def chosen(self) -> list[Chosen]:
        """Those to show, each once: the ends of the scales last."""
        usual = [s for kept in (*self._sources.values(), self._any) for s in kept.items()]
        found = {_key(sample): sample for sample in sorted(usual, key=_key)[: MOST - _AT_ENDS]}
        labels: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, kept in self._ends.items():
            for sample in kept.items():
                labels[_key(sample)].append(name)
                found.setdefault(_key(sample), sample)
        return [Chosen(sample, tuple(labels[key])) for key, sample in found.items()]


def _key(sample: Sample) -> tuple[str, str]:
    return sample.source, sample.sample_id
