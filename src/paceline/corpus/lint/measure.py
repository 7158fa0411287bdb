"""What a prepared corpus is made of: counted in one pass over its samples."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.types import Sample, Split

_MARKERS = (
    "<|im_start|>",
    "<|start_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "[INST]",
    "[/INST]",
    "### Response:",
    "### Assistant:",
)
"""What templates write around turns; inside a turn it was most likely rendered before."""


@dataclass(slots=True)
class Amount:
    """Samples with their tokens."""

    samples: int = 0
    tokens: int = 0
    trained: int = 0

    def add(self, sample: Sample) -> None:
        """Count one."""
        self.samples += 1
        self.tokens += len(sample.input_ids)
        self.trained += sample.num_loss_tokens

    @property
    def share(self) -> float:
        """Of the tokens, the part that is trained on."""
        return self.trained / self.tokens if self.tokens else 0.0


@dataclass(slots=True)
class SourceMeasure:
    """One source."""

    splits: dict[Split, Amount] = field(default_factory=lambda: defaultdict(Amount))
    lengths: Counter[int] = field(default_factory=Counter)
    """Samples by tokens."""
    all_trained: int = 0
    """Samples that have a prompt, or should, of which all tokens but the first are trained on."""
    texts: int = 0
    """Samples that are a text without turns."""
    marked: int = 0
    """Samples with marks of a chat template inside a turn."""

    @property
    def amount(self) -> Amount:
        """All splits together."""
        amounts = self.splits.values()
        return Amount(
            samples=sum(a.samples for a in amounts),
            tokens=sum(a.tokens for a in amounts),
            trained=sum(a.trained for a in amounts),
        )


@dataclass(slots=True)
class Measure:
    """All sources; but for `sources`, held-out prompts are left out."""

    ends: frozenset[int]
    """Ids that end an answer."""
    sources: dict[str, SourceMeasure] = field(default_factory=lambda: defaultdict(SourceMeasure))
    lengths: Counter[int] = field(default_factory=Counter)
    """Samples by tokens."""
    prompts: Counter[int] = field(default_factory=Counter)
    """Samples by tokens before the first that is trained on; all of them where none is."""
    answers: Counter[int] = field(default_factory=Counter)
    """Answers by tokens; a text without turns has none."""
    turns: Counter[int] = field(default_factory=Counter)
    """Samples with turns by user turns."""
    first_tokens: Counter[int] = field(default_factory=Counter)
    """Ids that answers begin with."""
    ended: int = 0
    """Answers that end with an end token."""
    cut: int = 0
    """Answers that end where the sample was cut."""
    unended: int = 0
    """Answers that end otherwise."""

    def add(self, sample: Sample, max_length: int) -> None:
        """Count one sample, which was cut to `max_length`."""
        source = self.sources[sample.source]
        source.splits[sample.split].add(sample)
        source.lengths[len(sample.input_ids)] += 1
        source.marked += _is_marked(sample)
        if sample.split is Split.HELDOUT:
            return
        length, spans = len(sample.input_ids), sample.loss_spans
        self.lengths[length] += 1
        if sample.messages:
            self.turns[sum(m["role"] == "user" for m in sample.messages)] += 1
        if is_text(sample):
            source.texts += 1
            return
        self.prompts[spans[0][0] if spans else length] += 1
        source.all_trained += bool(spans) and length - sample.num_loss_tokens <= 1
        for start, end in spans:
            self.answers[end - start] += 1
            self.first_tokens[sample.input_ids[start]] += 1
            if sample.input_ids[end - 1] in self.ends:
                self.ended += 1
            elif end == length == max_length:
                self.cut += 1
            else:
                self.unended += 1


def is_text(sample: Sample) -> bool:
    """Whether it is a text without turns: trained on but for the token that nothing precedes."""
    return not sample.messages and list(sample.loss_spans) == [(1, len(sample.input_ids))]


def _is_marked(sample: Sample) -> bool:
    return any(mark in str(turn["content"]) for turn in sample.messages for mark in _MARKERS)


def percentile(counts: Counter[int], share: float) -> int:
    """The smallest value that so large a share does not exceed; 0 of nothing."""
    wanted, so_far = share * counts.total(), 0
    for value in sorted(counts):
        so_far += counts[value]
        if so_far >= wanted:
            return value
    return 0


def histogram(counts: Counter[int], bars: int = 24) -> list[tuple[int, int, int]]:
    """Bars of one width, as (from, to, how many), the last value included; none of nothing."""
    if not counts:
        return []
    width = -(-(max(counts) + 1) // bars)
    sums = Counter[int]()
    for value, count in counts.items():
        sums[value // width] += count
    last = max(counts) // width
    return [(i * width, (i + 1) * width - 1, sums[i]) for i in range(last + 1)]


def mean(counts: Counter[int]) -> float:
    """0 of nothing."""
    return _sum(counts.items()) / counts.total() if counts else 0.0


def _sum(items: Iterable[tuple[int, int]]) -> int:
    return sum(value * count for value, count in items)
