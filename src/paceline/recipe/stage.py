"""The record that tells whether a stage's artefacts are whole, and made by this recipe."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from paceline.durable.checksum import crc64, crc64_hex
from paceline.durable.errors import IntegrityError, RecipeChanged
from paceline.durable.fs import remove_dead_partials, write_atomic
from paceline.recipe.fingerprint import Fields, difference, digest_file, fingerprint


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
class Record:
    """What a stage record's file holds."""

    stage: str
    fingerprint: str
    fields: Fields
    outputs: dict[str, str] | None = None
    """File name to digest; None until the stage has come to its end."""
    report: dict[str, Any] = field(default_factory=dict)
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


def changed_outputs(folder: Path, record: Record) -> list[Path]:
    """Outputs of a finished stage that are not there as they were written."""
    return [
        folder / name
        for name, digest in (record.outputs or {}).items()
        if not (folder / name).is_file() or digest_file(folder / name) != digest
    ]


class StageRecord:
    """`<folder>/<name>.stage.json`: written before the work with its fields, after it with outputs.

    Outputs are listed with size and checksum, so "done" is a statement about bytes, not about
    the existence of a file.
    """

    def __init__(self, folder: Path, name: str, fields: Fields) -> None:
        self._folder = folder
        self._path = folder / f"{name}.stage.json"
        self._fresh = Record(stage=name, fingerprint=fingerprint(fields), fields=fields)
        self._stored = read_record(folder, name)

    @property
    def fingerprint(self) -> str:
        """Of this stage's fields; later stages put it among theirs."""
        return self._fresh.fingerprint

    @property
    def report(self) -> dict[str, Any]:
        """The numbers of the run that completed the stage."""
        return self._stored.report if self._stored else {}

    def is_done(self) -> bool:
        """Whether all outputs are there as they were written.

        Raises RecipeChanged where artefacts of other fields stand here.
        """
        if self._stored is None:
            return False
        self._refuse_other_fields(self._stored)
        if self._stored.outputs is None:
            return False
        return not changed_outputs(self._folder, self._stored)

    def begin(self) -> list[str]:
        """Claim the folder for this recipe, before the first byte of content.

        Removes what killed processes left half-written in it; returns those names.
        """
        leftovers = remove_dead_partials(self._folder)
        if self._stored is None or self._stored.outputs is not None:
            self._store(self._fresh)
        return leftovers

    def finish(self, outputs: list[Path], report: dict[str, Any]) -> None:
        """Record completion; call it last."""
        digests = {str(p.relative_to(self._folder)): digest_file(p) for p in outputs}
        self._store(
            Record(
                stage=self._fresh.stage,
                fingerprint=self._fresh.fingerprint,
                fields=self._fresh.fields,
                outputs=digests,
                report=report,
            )
        )

    def _refuse_other_fields(self, stored: Record) -> None:
        if stored.fingerprint == self._fresh.fingerprint:
            return
        diff = "\n  ".join(difference(stored.fields, self._fresh.fields))
        raise RecipeChanged(
            f"{self._folder}: the {stored.stage} artefacts were made by another recipe "
            f"(made -> asked):\n  {diff}\n"
            "Two ways out: use a new run directory (`--run DIR`, or another `name:`), or put the "
            f"old values back. (To have {stored.stage} done anew here, remove {self._folder} "
            "yourself.)"
        )

    def _store(self, record: Record) -> None:
        record = replace(record, checksum=_checksum(record))
        write_atomic(self._path, msgspec.json.format(msgspec.json.encode(record), indent=1))
        self._stored = record


def _checksum(record: Record) -> str:
    plain = msgspec.json.encode(replace(record, checksum=""), order="deterministic")
    return crc64_hex(crc64(plain))


def _damaged(path: Path, name: str, reason: str) -> IntegrityError:
    return IntegrityError(
        f"{path}: not the stage record that was written ({reason}). Remove it and run "
        f"`paceline {name}` again: what is whole is kept, and the rest is done anew."
    )
