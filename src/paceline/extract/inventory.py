"""What an extraction has made: an inventory of its store by ranges of units."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.durable.checksum import crc64_hex
from paceline.durable.errors import DataError, IntegrityError, JournalDamaged, UserError
from paceline.durable.journal import fold, salvage
from paceline.durable.store import Stat
from paceline.extract.destination import Destination, destination
from paceline.extract.layout import JOURNAL, Layout, read_layout
from paceline.extract.ledger import Recorded, Survey, recorded, survey, verified_record
from paceline.extract.setting import kept_split
from paceline.features import manifest as manifests
from paceline.features.manifest import Manifest
from paceline.features.plan import Unit
from paceline.recipe.fingerprint import digest_file
from paceline.recipe.load import load_recipe
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import Recipe
from paceline.recipe.stage import Record, read_record
from paceline.target.folder import ModelFolder
from paceline.types.row_index import FILE_NAME as INDEX
from paceline.types.row_index import load_index
from paceline.types.rows import Rows, index_rows

State = Literal["verified", "missing", "bad", "quarantined"]


@dataclass(frozen=True, kw_only=True)
class UnitRange:
    """Units next to each other that stand alike."""

    first: int
    last: int
    state: State
    reason: str
    """Why it is missing or bad; empty where it was never made."""

    start: int
    """First sample, in the order of the plan."""

    stop: int
    """One behind the last."""

    bytes: int
    """Of its verified shards."""

    @property
    def samples(self) -> int:
        """How many."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class FailedUnit:
    """A unit that is not verified, and was tried in vain."""

    key: str
    attempts: int
    reason: str
    """Of the last attempt."""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """A store at one moment."""

    fingerprint: str
    store: str
    is_deep: bool
    """Whether every byte was read, or headers and sizes alone."""

    units: int
    """In the plan."""

    samples: int
    samples_elsewhere: int
    """Of the corpus, captured while training and never stored."""
    verified: int
    missing: int
    bad: int
    quarantined: int
    verified_samples: int
    bytes: int
    """Of verified shards."""

    ranges: tuple[UnitRange, ...]
    """All units of the plan, in order."""

    failed: tuple[FailedUnit, ...]
    foreign: tuple[str, ...]
    """Objects named like units that the plan does not know."""

    problems: tuple[str, ...]
    """What is wrong beside the units: the journal, the manifest."""

    is_published: bool
    """Whether the manifest is here. Several machines share a store: whoever completes the last
    shard publishes it there, and the others take it over."""

    is_finished: bool
    """Whether the extraction has come to its end, and all that its manifest lists is verified."""

    @property
    def is_whole(self) -> bool:
        """Whether all is verified, and nothing is wrong."""
        return self.verified == self.units and not self.problems


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An extraction to look at."""

    run_dir: RunDir
    recipe: Recipe
    record: Record
    source: Path
    rows: Rows
    layout: Layout
    units: tuple[Unit, ...]
    to: Destination

    @property
    def fingerprint(self) -> str:
        """Of the extraction."""
        return self.record.fingerprint


@dataclass(frozen=True)
class Papers:
    """What journal and manifest say, and what is wrong with them."""

    records: tuple[Mapping[str, Any], ...]
    """To judge the store by."""

    said: Recorded
    """What can be read of the journal, damaged or not."""

    manifest: Manifest | None
    journal_problem: str
    manifest_problem: str
    """Empty where it is whole, and where none has been published yet."""


def open_subject(run_dir: RunDir) -> Subject:
    """Read record, recipe and corpus of a run's extraction; writes nothing, loads no torch.

    Raises UserError where it never began, was cleaned away, or its corpus is another one now,
    IntegrityError where its record is damaged, and what the recipe, the corpus or the target's
    folder are refused for.
    """
    record = read_record(run_dir.features, "extract")
    if record is None:
        raise UserError(
            f"{run_dir.features}: no extraction has begun here. Give the run directory of one, "
            "such as runs/demo."
        )
    if record.outputs == {}:
        raise UserError(
            f"{run_dir.features}: the features were removed by `paceline clean`. "
            "`paceline extract` makes them again."
        )
    recipe = load_recipe(run_dir.recipe)
    source = run_dir.samples(recipe)
    digest = digest_file(source)
    if digest != record.fields.get("corpus"):
        raise UserError(
            f"{source}: not the corpus that these features were made of "
            f"({record.fields.get('corpus')}, now {digest}). Put that one back."
        )
    only = kept_split(recipe)
    rows = load_index(run_dir.features / INDEX, digest, only=only)
    if rows is None:
        rows = index_rows(source, vocab_size=None, max_position=None, only=only)
    layout = read_layout(record.fields, _hidden_size(recipe, run_dir))
    return Subject(
        run_dir=run_dir,
        recipe=recipe,
        record=record,
        source=source,
        rows=rows,
        layout=layout,
        units=layout.units(rows, recipe.extract.batch_tokens),
        to=destination(recipe.extract, run_dir, record.fingerprint),
    )


def read_papers(subject: Subject) -> Papers:
    """Read journal and manifest; changes nothing.

    Where the journal is lost or damaged, a whole manifest says what was verified. Raises
    IntegrityError for a journal of another format version.
    """
    fingerprint = subject.fingerprint
    manifest, manifest_problem = _manifest(subject)
    listed = [] if manifest is None else list(_records_of(manifest, subject.units))
    path = subject.run_dir.features / JOURNAL
    if not path.exists():
        problem = f"{path}: no such file, though the extraction has begun."
        said = recorded((), fingerprint)
        return Papers(tuple(listed), said, manifest, problem, manifest_problem)
    data = path.read_bytes()
    try:
        records = fold(data, path).records
    except JournalDamaged as error:
        problem = str(error).partition(": the file")[0]
        said = recorded(salvage(data), fingerprint)
        return Papers(tuple(listed), said, manifest, f"{problem}.", manifest_problem)
    return Papers(records, recorded(records, fingerprint), manifest, "", manifest_problem)


def look(subject: Subject, papers: Papers, *, deep: bool) -> Survey:
    """Compare the papers with the store."""
    return survey(
        papers.records,
        subject.to.store,
        subject.units,
        subject.rows,
        subject.fingerprint,
        source=subject.source,
        is_shared=not subject.to.is_own,
        deep=deep,
    )


def take_inventory(subject: Subject, papers: Papers, found: Survey, *, is_deep: bool) -> Inventory:
    """Put together what was found."""
    states = [_state(unit, papers.said, found) for unit in subject.units]
    ranges = tuple(_ranges(subject.units, states, found.done))
    count = {state: sum(s == state for s, _ in states) for state in ("missing", "bad")}
    aside = [s for s, _ in states].count("quarantined")
    failed = tuple(
        FailedUnit(key=unit.key, attempts=len(reasons), reason=reasons[-1])
        for unit in subject.units
        if unit.index not in found.done and (reasons := papers.said.failed.get(unit.key))
    )
    manifest = papers.manifest
    manifest_problem = papers.manifest_problem or _disagreement(subject, manifest, found)
    is_ended = subject.record.outputs is not None and not manifest_problem
    return Inventory(
        fingerprint=subject.fingerprint,
        store=subject.to.store.url,
        is_deep=is_deep,
        units=len(subject.units),
        samples=len(subject.rows),
        samples_elsewhere=subject.rows.other,
        verified=len(found.done),
        missing=count["missing"],
        bad=count["bad"],
        quarantined=aside,
        verified_samples=sum(r.samples for r in ranges if r.state == "verified"),
        bytes=sum(stat.size for stat in found.done.values()),
        ranges=ranges,
        failed=failed,
        foreign=found.foreign,
        problems=tuple(filter(None, (papers.journal_problem, manifest_problem))),
        is_published=manifest is not None and not manifest_problem,
        is_finished=is_ended and manifest is not None and len(found.done) >= len(manifest.units),
    )


def _hidden_size(recipe: Recipe, run_dir: RunDir) -> int:
    """Of the target; a published manifest spares looking at its folder, which may be elsewhere."""
    try:
        return manifests.load(run_dir.features).hidden_size
    except (DataError, IntegrityError):
        return ModelFolder(Path(recipe.target.path)).get("hidden_size")


def _manifest(subject: Subject) -> tuple[Manifest | None, str]:
    folder = subject.run_dir.features
    path = folder / manifests.FILE_NAME
    try:
        manifest = manifests.load(folder)
    except DataError:
        if subject.record.outputs is None:
            return None, ""
        return None, f"{path}: no such file, though the extraction was finished."
    except IntegrityError as error:
        return None, str(error).partition(" Run ")[0]
    if manifest.fingerprint != subject.fingerprint:
        return None, f"{path}: of another extraction (fingerprint {manifest.fingerprint})."
    return manifest, ""


def _records_of(manifest: Manifest, units: Sequence[Unit]) -> Iterator[dict[str, Any]]:
    by_key = {unit.key: unit for unit in units}
    for entry in manifest.units:
        if entry.key in by_key:
            stat = Stat(entry.size, int(entry.crc64, 16))
            yield verified_record(by_key[entry.key], stat, manifest.fingerprint)


def _disagreement(subject: Subject, manifest: Manifest | None, found: Survey) -> str:
    """Where all units are verified: what is wrong with a manifest that can be read."""
    if manifest is None or len(found.done) < len(subject.units):
        return ""
    path = subject.run_dir.features / manifests.FILE_NAME
    listed = {e.key: (e.size, e.crc64) for e in manifest.units}
    proven = {u.key: found.done[u.index] for u in subject.units}
    if listed != {key: (stat.size, crc64_hex(stat.crc64)) for key, stat in proven.items()}:
        return f"{path}: lists other shards than those that are there and verified."
    return ""


def _state(unit: Unit, said: Recorded, found: Survey) -> tuple[State, str]:
    if unit.index in found.done:
        return "verified", ""
    reason = found.redo.get(unit.key, "")
    if reason and not reason.startswith("recorded as done, but gone"):
        return "bad", reason
    if unit.key in said.quarantined:
        return "quarantined", said.quarantined[unit.key]
    if unit.key in found.staged:
        return "missing", "made, but not yet in the store"
    return "missing", reason


def _ranges(
    units: Sequence[Unit], states: Sequence[tuple[State, str]], done: Mapping[int, Stat]
) -> Iterator[UnitRange]:
    def kind(at: int) -> tuple[State, str]:
        state, reason = states[at]
        # What stands in parentheses tells one case from another of its kind.
        return state, reason.split(" (")[0]

    for (state, reason), group in groupby(range(len(units)), key=kind):
        members = list(group)
        first, last = members[0], members[-1]
        yield UnitRange(
            first=first,
            last=last,
            state=state,
            reason=states[first][1] if first == last else reason,
            start=units[first].start,
            stop=units[last].stop,
            bytes=sum(done[at].size for at in members) if state == "verified" else 0,
        )


def inventory_json(inventory: Inventory, rows: Rows) -> bytes:
    """One JSON object: the fields of Inventory, and `sample_ids` of each range not verified."""
    ranges = [
        {
            **_fields(r),
            "samples": r.samples,
            **({} if r.state == "verified" else {"sample_ids": rows.sample_ids[r.start : r.stop]}),
        }
        for r in inventory.ranges
    ]
    whole = {**_fields(inventory), "ranges": ranges, "is_whole": inventory.is_whole}
    return msgspec.json.encode(whole)


def unproven_ids(inventory: Inventory, rows: Rows) -> Iterator[str]:
    """The ids of all samples whose unit is not verified, in the order of the plan."""
    for found in inventory.ranges:
        if found.state != "verified":
            yield from rows.sample_ids[found.start : found.stop]


def _fields(value: Inventory | UnitRange) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
