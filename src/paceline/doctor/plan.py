"""What a run will need and when it will end, worked out before any model is loaded."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.doctor.plan_averaging import Averaging, averaging
from paceline.doctor.plan_bytes import Done, Samples, StoreSizes
from paceline.doctor.plan_facts import Asked, Facts, Needs
from paceline.doctor.plan_machine import Machine
from paceline.doctor.plan_memory import StageMemory
from paceline.doctor.plan_online import OnlinePlan, online_plan
from paceline.doctor.plan_rates import Flow, device_rate, flow
from paceline.doctor.plan_space import FileSystem, Staging
from paceline.doctor.plan_verdicts import Verdict, verdicts
from paceline.drafter.memory import checkpoint_bytes
from paceline.durable import space
from paceline.recipe.online import training_devices
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe

SCHEMA_VERSION = 1
"""Of `paceline plan --json`; a key is never renamed or removed within a version."""


@dataclass(frozen=True, kw_only=True)
class DrafterSizes:
    """Of the drafter."""

    parameters: int
    """Trained."""
    fc_parameters: int
    """Of them, those of the tap projection."""
    lm_head_parameters: int
    """Frozen: the target's, as far as tokens are proposed."""
    frozen_parameters: int
    """Those of lm_head and embedding together, which may be one."""
    weight_bytes: int
    checkpoint_bytes: int
    """With the optimizer's state of each drafter."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole answer. As JSON it has these keys; sizes are in bytes, times in seconds."""

    schema_version: int
    run: str
    target: str
    target_bytes: int | None
    """Of its weight files; None where they are not there."""
    target_in_memory: bool
    """Whether they lie on a file system in memory, of which they take their size for good."""
    samples: Samples
    done: Done
    """Of the samples; `flow` is the time of the others."""
    store: StoreSizes
    staging: Staging | None
    """None where nothing is uploaded."""
    flow: Flow
    online: OnlinePlan | None
    """None where the training reads its samples from the store."""
    drafter: DrafterSizes
    averaging: Averaging | None
    """None of one drafter alone."""
    file_systems: tuple[FileSystem, ...]
    memory: tuple[StageMemory, ...]
    machine: Machine
    verdicts: tuple[Verdict, ...]
    fits: bool
    """Whether nothing is known not to fit."""
    unknown: tuple[str, ...]
    """What could not be known, a sentence each."""


def make_plan(recipe: Recipe, run_dir: RunDir, asked: Asked) -> Plan:
    """Plan a checked recipe; reads configs, file headers and free space, writes nothing.

    Raises RecipeError for impossible taps, TargetError for a target without a usable config,
    UserError for a drafter to start from without one.
    """
    facts = Facts.read(recipe, run_dir, asked)
    needs = facts.needs(recipe, asked.lengths)
    judged = tuple(verdicts(recipe, facts, needs))
    speeds = _flow(recipe, facts, needs)
    is_tied = facts.target.spec.tie_word_embeddings
    drafters = len(training_devices(recipe.train))
    folder = Path(recipe.target.path)
    return Plan(
        schema_version=SCHEMA_VERSION,
        run=str(run_dir.root),
        target=str(folder),
        target_bytes=facts.target.file_bytes,
        target_in_memory=space.is_tmpfs(folder),
        samples=asked.samples,
        done=asked.done,
        store=needs.store,
        staging=needs.staging,
        flow=speeds,
        online=online_plan(recipe, facts, speeds.tokens_per_s),
        drafter=DrafterSizes(
            parameters=needs.drafter.parameters,
            fc_parameters=needs.drafter.fc_parameters,
            lm_head_parameters=needs.drafter.head_parameters,
            frozen_parameters=needs.drafter.frozen_parameters(is_tied=is_tied),
            weight_bytes=needs.drafter.weight_bytes,
            checkpoint_bytes=checkpoint_bytes(recipe.train, needs.drafter),
        ),
        averaging=averaging(needs, facts.machine, drafters=drafters, is_tied=is_tied),
        file_systems=needs.file_systems,
        memory=needs.memory,
        machine=facts.machine,
        verdicts=judged,
        fits=all(verdict.fits is not False for verdict in judged),
        unknown=tuple(_unknown(facts, speeds)),
    )


def _flow(recipe: Recipe, facts: Facts, needs: Needs) -> Flow:
    deepest = facts.target.spec.num_layers - 1 if needs.store.last else needs.store.taps[-1]
    rate = device_rate(
        facts.asked.tokens_per_s,
        recipe,
        facts.run_dir,
        facts.target,
        deepest=deepest,
        gpus=facts.machine.gpus,
    )
    return flow(
        rate,
        facts.asked.upload,
        recipe=recipe,
        tokens=facts.asked.samples.tokens,
        done=facts.asked.done.tokens,
        store=needs.store,
        staging=needs.staging,
        now=time.time(),
    )


def _unknown(facts: Facts, speeds: Flow) -> Iterator[str]:
    if facts.target.unknown:
        yield f"the target's weights, so what they take in memory: {facts.target.unknown}"
    if facts.machine.without_gpus:
        yield f"what GPUs there are: {facts.machine.without_gpus}"
    if speeds.tokens_per_s.value is None:
        yield f"the speed of the devices: {speeds.tokens_per_s.said}"
    if speeds.upload is not None and speeds.upload.value is None:
        yield f"the speed of the uploads: {speeds.upload.said}"
