"""What a training trains on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.durable.errors import DataError
from paceline.features.reader import FeatureReader
from paceline.recipe.fingerprint import digest_file
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.target.spec import TargetSpec
from paceline.train.batches import OnlineSamples
from paceline.train.source import SampleOrder, StoredFeatures, training_samples_per_shard
from paceline.types.row_index import open_rows
from paceline.types.sample import Split, read_samples

ROWS_INDEX = "train_rows.index"
"""The file in the checkpoints' folder that spares a resume reading the corpus."""


@dataclass(frozen=True, kw_only=True)
class TrainData:
    """The samples that a training uses, and their order."""

    stored: StoredFeatures
    """Where the validation samples are, and the training samples unless they are captured."""
    num_train: int
    """Distinct training samples: an epoch."""
    order: SampleOrder
    """The number of the training sample at each position: its store index, or, online, its place
    among the corpus's training samples."""
    tokens: Sequence[int] | npt.NDArray[np.int32]
    """Tokens of a training sample, by that number."""
    validation: tuple[int, ...]
    """Store indices of the samples that every evaluation uses."""
    captured: OnlineSamples | None = None
    """Where the training samples are in the corpus, where targets capture them; None where the
    store has them."""

    def tokens_until(self, end: int) -> int:
        """Tokens of the samples at positions 0..end-1."""
        epochs, rest = divmod(end, self.num_train)
        whole = sum(int(self.tokens[i]) for i in self.order.indices) if epochs else 0
        start = epochs * self.num_train
        part = (int(self.tokens[self.order(position)]) for position in range(start, start + rest))
        return epochs * whole + sum(part)


def open_data(
    recipe: Recipe, run_dir: RunDir, reader: FeatureReader, spec: TargetSpec
) -> tuple[TrainData, set[int]]:
    """The samples of a training, and every token id that stands in its corpus.

    Raises DataError where features are of another corpus, or there is nothing to train on.
    """
    splits: dict[str, Split] = {}
    used: set[int] = set()
    for sample in read_samples(run_dir.samples(recipe)):
        splits[sample.sample_id] = sample.split
        used.update(sample.input_ids)
    by_split: dict[Split, list[int]] = {split: [] for split in Split}
    for index, sample_id in enumerate(reader.sample_ids):
        if sample_id not in splits:
            raise DataError(
                f"{run_dir.features}: sample {sample_id} is not in {run_dir.samples(recipe)}. The "
                "features are those of another corpus: run `paceline extract` again."
            )
        by_split[splits[sample_id]].append(index)
    validation = _spread(by_split[Split.VALIDATION], recipe.train.eval_samples, reader.sample_ids)
    if recipe.train.online:
        return _captured_data(recipe, run_dir, reader, spec, validation), used
    if not by_split[Split.TRAIN]:
        raise DataError(f"{run_dir.features}: no training samples. See the report of `prepare`.")
    data = TrainData(
        stored=stored_of(recipe, run_dir),
        num_train=len(by_split[Split.TRAIN]),
        order=SampleOrder(
            tuple(by_split[Split.TRAIN]),
            reader.digest,
            seed=recipe.train.seed,
            shards=training_samples_per_shard(by_split[Split.TRAIN], reader.samples_per_shard),
            window=recipe.train.shard_window,
        ),
        validation=validation,
        tokens=reader.lengths,
    )
    return data, used


def _captured_data(
    recipe: Recipe,
    run_dir: RunDir,
    reader: FeatureReader,
    spec: TargetSpec,
    validation: tuple[int, ...],
) -> TrainData:
    corpus = run_dir.samples(recipe)
    rows = open_rows(
        corpus,
        digest_file(corpus),
        vocab_size=spec.vocab_size,
        max_position=spec.max_position,
        index=run_dir.checkpoints / ROWS_INDEX,
        only=Split.TRAIN,
    )
    # The store's fingerprint, and with it its digest, covers the corpus.
    order = SampleOrder(range(len(rows)), reader.digest, seed=recipe.train.seed)
    return TrainData(
        stored=stored_of(recipe, run_dir),
        num_train=len(rows),
        order=order,
        tokens=rows.lengths,
        validation=validation,
        captured=OnlineSamples(
            lines=rows.positions,
            tokens=rows.lengths,
            sample_of=order,
            ids=rows.sample_ids,
            batch_tokens=recipe.extract.batch_tokens,
        ),
    )


def stored_of(recipe: Recipe, run_dir: RunDir) -> StoredFeatures:
    """The features of a run, wherever their shards are."""
    return StoredFeatures(
        root=run_dir.features,
        options=recipe.extract.store_options,
        cache=run_dir.shard_cache,
        cache_bytes=recipe.train.cache_bytes,
    )


def _spread(indices: Sequence[int], count: int, ids: Sequence[str]) -> tuple[int, ...]:
    """`count` of the indices, chosen by id: the store's order is by length."""
    return tuple(sorted(sorted(indices, key=lambda i: ids[i])[:count]))
