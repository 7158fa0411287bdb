"""The record that tells whether a stage's artefacts are whole, and made by this recipe."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.durable.errors import IntegrityError, RecipeChanged
from paceline.durable.fs import write_atomic
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
class _Record:
    stage: str
    fingerprint: str
    fields: Fields
    outputs: dict[str, str] | None = None
    report: dict[str, Any] = field(default_factory=dict)


class StageRecord:
    """`<folder>/<name>.stage.json`: written before the work with its fields, after it with outputs.

    Outputs are listed with size and checksum, so "done" is a statement about bytes, not about
    the existence of a file.
    """

    def __init__(self, folder: Path, name: str, fields: Fields) -> None:
        self._folder = folder
        self._path = folder / f"{name}.stage.json"
        self._fresh = _Record(stage=name, fingerprint=fingerprint(fields), fields=fields)
        self._stored = self._load()

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
        return all(
            (self._folder / name).is_file() and digest_file(self._folder / name) == digest
            for name, digest in self._stored.outputs.items()
        )

    def begin(self) -> None:
        """Claim the folder for this recipe, before the first byte of content."""
        if self._stored is None or self._stored.outputs is not None:
            self._store(self._fresh)

    def finish(self, outputs: list[Path], report: dict[str, Any]) -> None:
        """Record completion; call it last."""
        digests = {str(p.relative_to(self._folder)): digest_file(p) for p in outputs}
        self._store(
            _Record(
                stage=self._fresh.stage,
                fingerprint=self._fresh.fingerprint,
                fields=self._fresh.fields,
                outputs=digests,
                report=report,
            )
        )

    def _refuse_other_fields(self, stored: _Record) -> None:
        if stored.fingerprint == self._fresh.fingerprint:
            return
        diff = "\n  ".join(difference(stored.fields, self._fresh.fields))
        raise RecipeChanged(
            f"{self._folder}: the {stored.stage} artefacts were made by another recipe "
            f"(made -> asked):\n  {diff}\n"
            "Two ways out: use a new run directory (`--run DIR`), or put the old values back."
        )

    def _store(self, record: _Record) -> None:
        write_atomic(self._path, msgspec.json.format(msgspec.json.encode(record), indent=1))
        self._stored = record

    def _load(self) -> _Record | None:
        if not self._path.exists():
            return None
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Record)
        except msgspec.MsgspecError as error:
            raise IntegrityError(
                f"{self._path}: not a stage record ({error}). It was damaged after it was "
                "written: remove it to have the stage redone."
            ) from error
