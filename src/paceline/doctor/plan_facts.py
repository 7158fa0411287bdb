"""What a plan rests on, and the same worked out anew for a recipe with other values."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.doctor.plan_bytes import Done, Samples, StoreSizes, store_sizes
from paceline.doctor.plan_machine import Machine, read_machine
from paceline.doctor.plan_memory import Sizes, StageMemory, memory
from paceline.doctor.plan_rates import Rate, device_names
from paceline.doctor.plan_space import (
    FileSystem,
    Staging,
    file_systems,
    places_of,
    staging_of,
)
from paceline.doctor.plan_target import TargetSizes, drafter_shape, read_target
from paceline.drafter.shape import DrafterShape
from paceline.features.plan import Lengths
from paceline.recipe.online import capture_devices, training_devices
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is known, or assumed, beside the recipe."""

    samples: Samples
    lengths: Lengths | None = None
    """Tokens of each sample, where they are known."""
    done: Done = field(default_factory=Done)
    """Of these samples."""
    online: Samples | None = None
    """Those that are captured while training, and not stored; None where the store has all."""
    drafter_tokens_per_s: float | None = None
    """Online: of one drafter; None has it looked up."""
    tokens_per_s: float | None = None
    """Of all devices together; None has it looked up or guessed."""
    upload: Rate | None = None
    """Bytes per second to the store."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a recipe needs."""

    store: StoreSizes
    staging: Staging | None
    drafter: DrafterShape
    file_systems: tuple[FileSystem, ...]
    memory: tuple[StageMemory, ...]

    def stage(self, name: str, device: str | None = None) -> StageMemory | None:
        """The memory of a stage, or of its part on `device`; None of one that does not run."""
        found = (s for s in self.memory if s.stage == name and device in (None, s.device))
        return next(found, None)

    def file_system(self, point: str) -> FileSystem | None:
        """The file system mounted there; None where nothing is written to it."""
        return next((found for found in self.file_systems if found.point == point), None)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What holds whatever the recipe's sizes are."""

    run_dir: RunDir
    asked: Asked
    target: TargetSizes
    machine: Machine

    @classmethod
    def read(cls, recipe: Recipe, run_dir: RunDir, asked: Asked) -> "Facts":
        """Look at the target's files and at this machine."""
        devices = (
            *device_names(recipe),
            recipe.target.device,
            *capture_devices(recipe),
            *training_devices(recipe.train),
        )
        return cls(
            run_dir=run_dir,
            asked=asked,
            target=read_target(Path(recipe.target.path)),
            machine=read_machine(tuple(dict.fromkeys(devices))),
        )

    def needs(self, recipe: Recipe, lengths: Lengths | None = None) -> Needs:
        """What `recipe` needs, exactly for samples of these `lengths`.

        Without them the shards are counted by the mean, which is a few headers off. Raises
        RecipeError for impossible taps.
        """
        spec = self.target.spec
        samples = self.asked.samples
        trained = self.asked.online or samples
        if lengths is None:
            samples, trained = (
                replace(s, longest=min(s.longest, recipe.corpus.max_length))
                for s in (samples, trained)
            )
        store = store_sizes(
            recipe.extract,
            samples,
            lengths,
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
        )
        drafter = drafter_shape(recipe.drafter, spec, len(store.taps))
        staging = staging_of(recipe, self.run_dir, store)
        places = places_of(
            recipe, self.run_dir, samples, store, drafter, staging, self.asked.online
        )
        systems = file_systems(places, high_mark=recipe.extract.high_mark)
        sizes = Sizes(
            target=self.target, drafter=drafter, samples=samples, trained=trained, store=store
        )
        return Needs(
            store=store,
            staging=staging,
            drafter=drafter,
            file_systems=systems,
            memory=memory(
                recipe,
                sizes,
                staging_bytes=staging.limit if staging is not None and staging.is_memory else 0,
                files_in_memory=_files_in_memory(systems),
            ),
        )


def _files_in_memory(systems: Sequence[FileSystem]) -> int:
    """Bytes still to be written to file systems that lie in memory, the staging left out."""
    return sum(
        place.needs
        for system in systems
        if system.kind in ("tmpfs", "ramfs")
        for place in system.places
        if place.what != "staging"
    )
