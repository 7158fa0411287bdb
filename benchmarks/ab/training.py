"""Train an arm for a budget of CPU-seconds that has to be known before it begins."""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.drafter.dflash import DFlash
from paceline.durable.fs import write_atomic
from paceline.features.reader import FeatureReader
from paceline.recipe.fingerprint import flatten
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.training import training_fields
from paceline.target.head import TargetHead
from paceline.target.spec import TargetSpec, read_spec
from paceline.train.batch import anchor_sample
from paceline.train.checkpoint import fresh_state
from paceline.train.crew import PaceOf, Solo
from paceline.train.data import TrainData, open_data, stored_of
from paceline.train.learner import Learner, StepResult
from paceline.train.loop import Trainer
from paceline.train.rng import seeded
from paceline.train.sides import Sides
from paceline.train.source import Feed, stored_features
from paceline.train.start import first_drafter
from paceline.train.vocabulary import VocabularyCounts
from paceline.watch.events import EventWriter

_WARM_STEPS, _STEPS = 3, 20
"""Steps of an arm that do not count for its cost, and that do: they stand for equal shares of the
run, so that a term which comes in late counts for as long as it is there."""

TRAINED = "trained.json"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all arms have in common."""

    recipe: Recipe
    run: RunDir
    spec: TargetSpec
    reader: FeatureReader
    data: TrainData
    used: frozenset[int]
    """Token ids of the corpus."""

    def first_drafter(self) -> DFlash:
        """The same weights each time."""
        counts = VocabularyCounts(
            self.recipe.drafter,
            self.spec,
            Path(self.recipe.target.path),
            samples=self.run.samples(self.recipe),
            kept=self.run.root / "text_counts.json",
        )
        taps = self.reader.manifest.layer_ids
        return first_drafter(self.recipe, self.spec, taps, counts, used=self.used).float()

    def head(self, drafter: DFlash) -> TargetHead:
        """For this drafter, with all that any objective reads."""
        path = Path(self.recipe.target.path)
        whole = TargetHead.load(path, dtype=torch.float32, device="cpu")
        return drafter.narrowed(whole, keep_whole=True)


def open_bench(recipe: Recipe, run: RunDir) -> Bench:
    """Read what there is to train on; raises DataError where there is nothing."""
    reader, spec = stored_of(recipe, run).open(), read_spec(Path(recipe.target.path))
    data, used = open_data(recipe, run, reader, spec)
    return Bench(recipe=recipe, run=run, spec=spec, reader=reader, data=data, used=frozenset(used))


def costs(bench: Bench, recipes: Mapping[str, Recipe]) -> dict[str, float]:
    """CPU-seconds of a sample, by arm: arms take turns, so a busy machine is the same for all.

    The rate is 0, so that one drafter serves all of them.
    """
    recipe = bench.recipe.train
    drafter = bench.first_drafter()
    head = bench.head(drafter)
    learners = {name: Learner(r.train, drafter, head) for name, r in recipes.items()}
    spent = dict.fromkeys(learners, 0.0)
    for step in range(-_WARM_STEPS, _STEPS):
        begin = time.process_time()
        first = (step + _WARM_STEPS) * recipe.batch_samples
        read = [bench.reader.read(bench.data.order(first + i)) for i in range(recipe.batch_samples)]
        reading = time.process_time() - begin
        for name, learner in learners.items():
            begin = time.process_time()
            samples = [
                anchor_sample(f, count=recipe.anchors, seed=recipe.seed, epoch=0) for f in read
            ]
            # A warm-up step has the terms of the run's end, which are those that come in late.
            progress = (step + 0.5) / _STEPS if step >= 0 else 1.0
            learner.learn(samples, 0.0, progress)
            if step >= 0:
                spent[name] += time.process_time() - begin + reading
    return {name: total / _STEPS / recipe.batch_samples for name, total in spent.items()}


class _Metered(Solo):
    """Whose steps are timed, reading included; evaluations and checkpoints are not."""

    cpu_seconds = 0.0

    def advance(self, feed: Feed, samples: int, pace: PaceOf) -> Sequence[StepResult]:
        begin = time.process_time()
        results = super().advance(feed, samples, pace)
        self.cpu_seconds += time.process_time() - begin
        return results


def trained(
    bench: Bench, recipe: Recipe, folder: Path, budget: float, cost: float
) -> dict[str, Any]:
    """What became of an arm's training, now or before; the drafter lies in its `drafter` folder.

    A training that was stopped begins anew. Raises ValueError where `folder` holds the training of
    another recipe or of other features.
    """
    # The epochs follow from the budget, which names the folder.
    fields = {
        "features": bench.reader.digest,
        "drafter": asdict(bench.recipe.drafter),
        "train": training_fields(recipe.train) | {"epochs": None},
    }
    made_with = json.loads(json.dumps(flatten(fields), default=asdict))
    kept = folder / TRAINED
    if kept.is_file():
        found = json.loads(kept.read_text())
        if found["made_with"] != made_with:
            raise ValueError(
                f"{folder}: trained with another recipe, or other features. Remove it."
            )
        return found
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "events").mkdir(parents=True)
    size, distinct = recipe.train.batch_samples, bench.data.num_train
    samples = max(1, round(budget / cost / size)) * size
    train = replace(recipe.train, epochs=samples / distinct)
    begin = time.monotonic()
    with (
        EventWriter(folder / "events", "train") as events,
        seeded(train.seed, torch.device("cpu")),
    ):
        drafter = bench.first_drafter()
        metered = _Metered(train, drafter, bench.head(drafter), distinct=distinct)
        trainer = Trainer(
            train,
            bench.data,
            metered,
            fresh_state(folder.name),
            feed=lambda agenda: stored_features(
                bench.data.stored, agenda, bench.data.order, train.queue_bytes
            ),
            sides=Sides(targets=1, drafters=1),
            checkpoints=folder / "checkpoints",
            events=events,
        )
        *_, last = trainer.run()
    state = trainer.state
    outcome = {
        "made_with": made_with,
        "cpu_seconds": round(metered.cpu_seconds, 1),
        "seconds": round(time.monotonic() - begin, 1),
        "cpu_seconds_per_sample": metered.cpu_seconds / state.samples,
        "calibrated_per_sample": cost,
        "samples": state.samples,
        "epochs": round(train.epochs, 3),
        "steps": state.step,
        "skipped_steps": state.skipped_steps,
        "drafter": str(last.relative_to(folder)),
    }
    write_atomic(kept, json.dumps(outcome, indent=1).encode())
    return outcome
