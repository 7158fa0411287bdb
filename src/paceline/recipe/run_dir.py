"""The run directory: where everything of one run lies."""

from dataclasses import dataclass
from pathlib import Path

from paceline.recipe.schema import Recipe


@dataclass(frozen=True)
class RunDir:
    """Names of the places in a run directory; creates nothing."""

    root: Path

    @property
    def recipe(self) -> Path:
        """The fully resolved recipe."""
        return self.root / "recipe.yaml"

    @property
    def corpus(self) -> Path:
        """Samples, quarantine, reports of prepare and regenerate."""
        return self.root / "corpus"

    @property
    def prepared(self) -> Path:
        """What `prepare` makes."""
        return self.corpus / "prepared.jsonl"

    @property
    def regenerated(self) -> Path:
        """What `regenerate` makes: the prepared prompts with the target's answers."""
        return self.corpus / "regenerated.jsonl"

    @property
    def features(self) -> Path:
        """The feature store, or what belongs to it: journal, record, manifest."""
        return self.root / "features"

    @property
    def staging(self) -> Path:
        """Shards that wait for their upload, where no better place has room."""
        return self.root / "staging"

    @property
    def shard_cache(self) -> Path:
        """Local copies of an object store's shards."""
        return self.root / "cache"

    @property
    def tee(self) -> Path:
        """What an online training has captured and kept."""
        return self.root / "tee"

    @property
    def checkpoints(self) -> Path:
        """`step_000600/` folders."""
        return self.root / "checkpoints"

    @property
    def score(self) -> Path:
        """Results of the measurement."""
        return self.root / "score"

    @property
    def events(self) -> Path:
        """One JSONL file per process."""
        return self.root / "events"

    @property
    def report(self) -> Path:
        """The run on one page."""
        return self.root / "report.html"

    def samples(self, recipe: Recipe) -> Path:
        """The corpus file that is trained on."""
        return self.regenerated if recipe.regenerate.enabled else self.prepared
