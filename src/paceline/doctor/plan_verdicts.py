"""What fits and what does not, and what would make it fit."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.doctor import plan_advice as advice
from paceline.doctor.plan_facts import Facts, Needs
from paceline.doctor.plan_memory import StageMemory, Where
from paceline.doctor.plan_space import FileSystem, mark_for
from paceline.durable import space, staging
from paceline.durable.errors import PacelineError
from paceline.recipe.schema import Recipe
from paceline.watch.words import counted, short_bytes

_ANY = 2**63
"""A limit for needs that have been judged already."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One thing that must fit somewhere."""

    name: str
    """Such as `staging`, `disk /data`, `cuda:0 in train`, `memory in extract`."""
    needs: int
    """Bytes, of what is known."""
    has: int | None
    """Bytes that are there; None where that is not known."""
    fits: bool | None
    """None where `needs` is not all, or `has` is not known."""
    said: str = ""
    """What the two numbers are of, and what is not in them."""
    advice: tuple[str, ...] = ()
    """Where it does not fit: each alone makes it fit."""


def device_name(stage: StageMemory) -> str:
    """`cuda:0 in train`, `each of 4 GPUs in extract`."""
    count = stage.device.count(",") + 1
    place = stage.device if count == 1 else f"each of {count} GPUs"
    return f"{place} in {stage.stage}"


def host_name(stage: StageMemory) -> str:
    """`memory in train`."""
    return f"memory in {stage.stage}"


def verdicts(recipe: Recipe, facts: Facts, needs: Needs) -> Iterator[Verdict]:
    """Everything that must fit, in the order in which a run meets it."""
    judge = _Judge(recipe, facts, needs)
    yield from judge.staging()
    for system in needs.file_systems:
        yield judge.disk(system)
    for stage in needs.memory:
        if stage.on_device:
            yield judge.device(stage)
    for stage in needs.memory:
        if stage.on_host:
            yield judge.host(stage)


@dataclass(frozen=True)
class _Judge:
    recipe: Recipe
    facts: Facts
    needs: Needs

    def staging(self) -> Iterator[Verdict]:
        found = self.needs.staging
        if found is None:
            return
        fits = found.smallest <= found.limit
        one = "the largest sample" if self.needs.store.is_one_sample else "the largest shard"
        yield Verdict(
            name="staging",
            needs=found.smallest,
            has=found.limit,
            fits=fits,
            said=f"{one}, against the bytes that may wait in {found.path}",
            advice=() if fits else self._for_staging(found.smallest, found.limit),
        )

    def _for_staging(self, smallest: int, limit: int) -> tuple[str, ...]:
        asked, here = self.recipe.extract, self.needs.staging
        found: list[str] = []
        room = space.read_space(Path(here.path)).free if here is not None else 0
        if asked.staging_bytes is not None and smallest <= room:
            found.append(f"extract.staging_bytes={smallest} ({short_bytes(smallest)})")
        for folder in (self.facts.run_dir.staging, staging.SHARED_MEMORY):
            if here is None or str(folder) == here.path or not space.nearest(folder).is_dir():
                continue
            free = space.read_space(folder).free
            if asked.staging_bytes is None and smallest <= staging.staging_limit(None, folder):
                found.append(f"extract.staging={folder} ({short_bytes(free)} free)")

        def largest(recipe: Recipe) -> int | None:
            needs = self._try(recipe)
            return None if needs is None else needs.store.largest_shard

        found += advice.mend(self.recipe, advice.for_shards(self.recipe), largest, limit)
        return tuple(found)

    def disk(self, system: FileSystem) -> Verdict:
        is_marked = (
            system.below_mark is not None
            and system.needs <= system.room
            and system.needs_below_mark > system.below_mark
        )
        names = ", ".join(place.what for place in system.places)
        limit = f" but for the last {short_bytes(system.spare)}" if system.spare else ""
        if is_marked:
            limit = f" below extract.high_mark {self.recipe.extract.high_mark:g}"
        return Verdict(
            name=f"disk {system.point}",
            needs=system.needs_below_mark if is_marked else system.needs,
            has=system.below_mark if is_marked else system.room,
            fits=system.fits,
            said=f"{names}; the room there{limit}",
            advice=() if system.fits else self._for_disk(system),
        )

    def _for_disk(self, system: FileSystem) -> tuple[str, ...]:
        found: list[str] = []
        mark = mark_for(system, self.recipe.extract.high_mark)
        if mark is not None:
            found.append(f"extract.high_mark={mark:g}")

        def needed(recipe: Recipe) -> int | None:
            needs = self._try(recipe)
            there = None if needs is None else needs.file_system(system.point)
            return there.needs if there is not None and there.fits else None

        kinds = {place.what for place in system.places}
        series = [
            *(advice.for_bytes(self.recipe) if "features" in kinds else ()),
            *(advice.for_checkpoints(self.recipe) if "checkpoints" in kinds else ()),
        ]
        found += advice.mend(self.recipe, series, needed, _ANY)
        features = next((p for p in system.places if p.what == "features"), None)
        if features is not None:
            # What is short is taken from the samples; all else stays.
            short = system.needs - system.room
            samples = self.facts.asked.samples.count
            fitting = int(samples * (1 - short / max(1, features.bytes)))
            if 0 < fitting < samples and self.facts.asked.online is None:
                found.append(f"{counted(fitting, 'sample')} instead of {samples:,}")
            found.append(f"extract.store on another disk ({short_bytes(features.needs)})")
        else:
            found.append(f"another disk for the run, `--run DIR` ({short_bytes(system.needs)})")
        return tuple(found)

    def device(self, stage: StageMemory) -> Verdict:
        gpus = [self.facts.machine.gpus.get(name) for name in stage.device.split(", ")]
        has = None
        if gpus and all(gpus):
            has = min(gpu.total for gpu in gpus if gpu is not None)
        return self._memory(stage, "device", device_name(stage), has)

    def host(self, stage: StageMemory) -> Verdict:
        return self._memory(stage, "host", host_name(stage), self.facts.machine.host.available)

    def _memory(self, stage: StageMemory, where: Where, name: str, has: int | None) -> Verdict:
        total, unknown = stage.total(where), stage.unknown(where)
        fits: bool | None = None
        if has is not None and total > has:
            fits = False
        elif has is not None and not unknown:
            fits = True
        return Verdict(
            name=name,
            needs=total,
            has=has,
            fits=fits,
            said=f"without {', '.join(unknown)}, not known" if unknown else "",
            advice=self._for_memory(stage, where, has) if fits is False and has else (),
        )

    def _for_memory(self, stage: StageMemory, where: Where, limit: int) -> tuple[str, ...]:
        def needed(recipe: Recipe) -> int | None:
            needs = self._try(recipe)
            found = None if needs is None else needs.stage(stage.stage, stage.device)
            return None if found is None else found.total(where)

        series = []
        if where == "host" and stage.stage == "extract":
            series += self._less_staging()
        if stage.stage == "train":
            series += advice.for_training(self.recipe)
        else:
            series += advice.for_target(self.recipe, on_cpu=where == "host")
        found = advice.mend(self.recipe, series, needed, limit)
        short = short_bytes(stage.total(where) - limit)
        return found or (f"{short} more: no change of the recipe that was tried is enough",)

    def _less_staging(self) -> Iterator[advice.Series]:
        """A smaller budget, or one on a disk, where the staging lies in memory."""
        found = self.needs.staging
        if found is None or not found.is_memory:
            return
        budgets = (size for size in (found.smooth, found.smallest) if size < found.limit)
        yield tuple(("extract.staging_bytes", size) for size in budgets)
        yield (("extract.staging", str(self.facts.run_dir.staging)),)

    def _try(self, recipe: Recipe) -> Needs | None:
        """The needs of a changed recipe; None where it is impossible."""
        try:
            return self.facts.needs(recipe)
        except PacelineError:
            return None
