"""The record that tells whether a stage's artefacts are whole, and made by this recipe."""

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from paceline.durable.checksum import crc64, crc64_hex
from paceline.durable.errors import IntegrityError, RecipeChanged
from paceline.durable.fs import remove_dead_partials, write_atomic
from paceline.recipe.fingerprint import (
    ABSENT,
    Fields,
    changed_fields,
    difference,
    digest_file,
    fingerprint,
    keys_of,
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a stage did, for the terminal and for `run`."""

    stage: str
    skipped: bool = False
    """True where all had been done before and nothing was touched."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """JSON values: counts, rates, τ."""
    lines: tuple[str, ...] = ()
    """Sentences for the terminal, in order."""
    undone: tuple[str, ...] = ()
    """What was asked for and could not be done, a sentence each; any makes the exit code 1."""


@dataclass(frozen=True, kw_only=True)
class Override:
    """A field that was changed, by permission, while artefacts stood here."""

    key: str
    made: Any
    asked: Any
    step: int
    """Where the stage stood."""
    fingerprint: str
    """Of the stage before; what carries it is still this stage's own."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a stage record's file holds."""

    stage: str
    fingerprint: str
    fields: Fields
    outputs: dict[str, str] | None = None
    """File name to digest; None until the stage has come to its end, empty once its artefacts were
    cleaned away: stages that need none of them go on, and the stage itself begins anew."""
    report: dict[str, Any] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()
    """In the order they were made."""
    checksum: str = ""
    """CRC64NVME of all the above; a number in it would else be changed unseen."""


def read_record(folder: Path, name: str) -> Record | None:
    """The record of stage `name` in `folder`; None where it never began.

    Raises IntegrityError where the file is not as it was written.
    """
    path = folder / f"{name}.stage.json"
    if not path.exists():
        return None
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise _damaged(path, name, str(error)) from error
    # A record without a checksum still has its fingerprint to be judged by.
    if record.checksum not in ("", _checksum(record)) or record.fingerprint != fingerprint(
        record.fields
    ):
        raise _damaged(path, name, "its checksum does not hold")
    return record


def outputs_digest(record: Record) -> str | None:
    """One name for the outputs of a finished stage, by their content; None of an unfinished one.

    Of the training it names the chosen drafter: `score` has it among its fields.
    """
    if not record.outputs:
        return None
    encoded = msgspec.json.encode(record.outputs, order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:32]


def changed_outputs(folder: Path, record: Record) -> list[Path]:
    """Outputs of a finished stage that are not there as they were written."""
    return [
        folder / name
        for name, digest in (record.outputs or {}).items()
        if not (folder / name).is_file() or digest_file(folder / name) != digest
    ]


def mark_cleaned(folder: Path, name: str) -> None:
    """Note in the record of a finished stage that its artefacts are being removed on purpose.

    Raises IntegrityError as `read_record`, OSError where the disk refuses.
    """
    record = read_record(folder, name)
    if record is not None and record.outputs:
        report = {**record.report, "cleaned": round(time.time(), 3)}
        _write(folder, replace(record, outputs={}, report=report))


class StageRecord:
    """`<folder>/<name>.stage.json`: written before the work with its fields, after it with outputs.

    Outputs are listed with size and checksum, so "done" is a statement about bytes, not about
    the existence of a file.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        fields: Fields,
        *,
        changeable: Sequence[str] = (),
        allowed: Sequence[str] = (),
        binds: bool = True,
        begins_from: Record | None = None,
    ) -> None:
        """`changeable` keys are offered where they differ; `allowed` ones may differ.

        `binds` tells whether an unfinished stage holds the folder for its fields: not where
        nothing of it stands yet that other fields could be mixed with. `begins_from` is what the
        stage takes over from another folder: its fields count as those made here.
        """
        self._folder = folder
        self._changeable, self._allowed = changeable, allowed
        self._path = folder / f"{name}.stage.json"
        self._fresh = Record(stage=name, fingerprint=fingerprint(fields), fields=fields)
        self._stored = read_record(folder, name)
        if self._stored is not None and self._stored.outputs is None and not binds:
            self._stored = None
        if begins_from is not None:
            # Never the end of this stage; empty outputs have `begin` write a record.
            self._stored = replace(begins_from, outputs={}, report={})
        self._claim: tuple[int, ...] | None = None

    @property
    def fingerprint(self) -> str:
        """Of this stage's fields; later stages put it among theirs."""
        return self._fresh.fingerprint

    @property
    def report(self) -> dict[str, Any]:
        """The numbers of the run that completed the stage."""
        return self._stored.report if self._stored else {}

    @property
    def fingerprints(self) -> frozenset[str]:
        """Of this stage, now and before each override: what carries another is not its own."""
        earlier = self._stored.overrides if self._stored else ()
        return frozenset((self.fingerprint, *(o.fingerprint for o in (*earlier, *self.changes()))))

    def changes(self, step: int = 0) -> tuple[Override, ...]:
        """The allowed fields that differ from what is recorded; `begin` records them."""
        if self._stored is None:
            return ()
        made, asked = self._stored.fields, self._fresh.fields
        return tuple(
            Override(
                key=key,
                made=made.get(key, ABSENT),
                asked=asked.get(key, ABSENT),
                step=step,
                fingerprint=self._stored.fingerprint,
            )
            for key in changed_fields(made, asked)
            if keys_of([key], self._allowed)
        )

    def is_done(self) -> bool:
        """Whether all outputs are there as they were written, by these very fields.

        Raises RecipeChanged where artefacts of other fields stand here, unless each that differs
        is allowed to.
        """
        if self._stored is None:
            return False
        self._refuse_other_fields(self._stored)
        if not self._stored.outputs or self._stored.fingerprint != self.fingerprint:
            return False
        return not changed_outputs(self._folder, self._stored)

    def begin(self, *, step: int = 0) -> list[str]:
        """Claim the folder for this recipe, before the first byte of content.

        Removes what killed processes left half-written in it; returns those names. `step` is
        where the stage stands, for the record of overrides.
        """
        leftovers = remove_dead_partials(self._folder)
        changes = self.changes(step)
        if self._stored is None or self._stored.outputs is not None or changes:
            earlier = self._stored.overrides if self._stored else ()
            self._store(replace(self._fresh, overrides=(*earlier, *changes)))
        self._claim = _identity(self._path)
        return leftovers

    def require_claim(self) -> None:
        """Raise IntegrityError where the record that `begin` left is gone or another's.

        Then the folder was removed while the stage worked, and may belong to another run by now.
        """
        if self._claim is None:
            raise ValueError("`begin` comes first")
        if _identity(self._path) == self._claim:
            return
        raise IntegrityError(
            f"{self._path}: removed or replaced while this command ran; another may be at work "
            "there by now. Stopped: nothing more is written there."
        )

    def finish(self, outputs: list[Path], report: dict[str, Any]) -> None:
        """Record completion; call it last. Raises what `require_claim` raises."""
        self.require_claim()
        digests = {str(p.relative_to(self._folder)): digest_file(p) for p in outputs}
        overrides = self._stored.overrides if self._stored else ()
        self._store(replace(self._fresh, outputs=digests, report=report, overrides=overrides))

    def _refuse_other_fields(self, stored: Record) -> None:
        changed = changed_fields(stored.fields, self._fresh.fields)
        refused = [key for key in changed if not keys_of([key], self._allowed)]
        if not refused:
            return
        made = {k: v for k, v in stored.fields.items() if k in refused}
        asked = {k: v for k, v in self._fresh.fields.items() if k in refused}
        diff = "\n  ".join(difference(made, asked))
        raise RecipeChanged(
            f"{self._folder}: the {stored.stage} artefacts were made by another recipe "
            f"(made -> asked):\n  {diff}\n"
            "Two ways out: use a new run directory (`--run DIR`, or another `name:`), or put the "
            f"old values back.{permission(changed, self._changeable)} (To have {stored.stage} done "
            f"anew here, remove {self._folder} yourself.)"
        )

    def _store(self, record: Record) -> None:
        self._stored = _write(self._folder, record)


def _write(folder: Path, record: Record) -> Record:
    """Returns it with its checksum."""
    record = replace(record, checksum=_checksum(record))
    encoded = msgspec.json.format(_encoded(record), indent=1)
    write_atomic(folder / f"{record.stage}.stage.json", encoded)
    return record


def _identity(path: Path) -> tuple[int, ...]:
    """Of the very file; empty where there is none. A number of a file alone is used again."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_dev, stat.st_ino, stat.st_ctime_ns


def permission(changed: Iterable[str], changeable: Sequence[str]) -> str:
    """A sentence on how to go on with the changed fields, if all of them may change; else empty.

    `changed` are all that differ, those included that are allowed already: the sentence is the
    whole of what has to be said.
    """
    changed = list(changed)
    if not all(keys_of([field], changeable) for field in changed):
        return ""
    flags = " ".join(f"--allow-change {key}" for key in keys_of(changed, changeable))
    return f" Or go on from what is there with the new ones: `{flags}`."


def _encoded(record: Record) -> bytes:
    """Without overrides where there are none: such records are the same with any version."""
    plain = msgspec.json.encode(record, order="deterministic")
    if record.overrides:
        return plain
    before, _, after = plain.rpartition(b',"overrides":[]')
    return before + after


def _checksum(record: Record) -> str:
    return crc64_hex(crc64(_encoded(replace(record, checksum=""))))


def _damaged(path: Path, name: str, reason: str) -> IntegrityError:
    return IntegrityError(
        f"{path}: not the stage record that was written ({reason}). Remove it and run "
        f"`paceline {name}` again: what is whole is kept, and the rest is done anew."
    )
