"""Mending an extraction's papers from what its store proves; shards are never touched."""

import time
from pathlib import Path

from paceline.durable.errors import UserError
from paceline.durable.fs import REAL_FS, FileSystem, write_atomic
from paceline.durable.journal import journal_bytes
from paceline.extract.inventory import Papers, Subject
from paceline.extract.layout import JOURNAL
from paceline.extract.ledger import Survey, verified_record
from paceline.features import manifest as manifests
from paceline.watch.words import counted


def repair(
    subject: Subject,
    papers: Papers,
    found: Survey,
    *,
    publish: bool,
    fs: FileSystem = REAL_FS,
) -> tuple[str, ...]:
    """Mend journal and manifest; say what was done, a sentence each.

    The caller holds the run. A journal that is damaged, or lost, is written anew from what the
    store proves; the damaged one is kept beside it. With `publish` a manifest is published where
    every unit is verified. Raises UserError where another process writes the journal, OSError where
    the disk refuses; then the papers are as they were, or mended.
    """
    lines = []
    if papers.journal_problem:
        lines.append(_mend_journal(subject, papers, found, fs))
    if publish and len(found.done) == len(subject.units):
        manifest = subject.layout.manifest(
            subject.rows,
            subject.units,
            found.done,
            fingerprint=subject.fingerprint,
            store=subject.to.url,
        )
        path = manifests.publish(subject.run_dir.features, manifest, fs=fs)
        if subject.to.url:
            subject.to.store.put(manifests.FILE_NAME, path)
        lines.append(f"{path}: published anew, with {counted(len(subject.units), 'shard')}.")
    return tuple(lines)


def _mend_journal(subject: Subject, papers: Papers, found: Survey, fs: FileSystem) -> str:
    path = subject.run_dir.features / JOURNAL
    with fs.open_append(path) as file:
        if not fs.lock(file):
            raise UserError(f"{path}: another process is writing this journal. Wait for its end.")
        damaged = path.read_bytes()
        aside = ""
        if damaged:
            kept = _free_name(path)
            write_atomic(kept, damaged, fs=fs)
            aside = f" The damaged one is kept as {kept.name}."
        # In one step: a crash leaves the old journal or the new one.
        write_atomic(path, journal_bytes(_records(subject, papers, found)), fs=fs)
    return (
        f"{path}: written anew, with {counted(len(found.done), 'shard')} that the store proves."
        f"{aside}"
    )


def _records(subject: Subject, papers: Papers, found: Survey) -> list[dict[str, object]]:
    records: list[dict[str, object]] = [
        verified_record(unit, found.done[unit.index], subject.fingerprint)
        for unit in subject.units
        if unit.index in found.done
    ]
    undone = {unit.key for unit in subject.units if unit.index not in found.done}
    for key, reasons in papers.said.failed.items():
        if key in undone:
            records += [_told(subject, "failed", key, reason) for reason in reasons]
    for key, reason in papers.said.quarantined.items():
        if key in undone:
            records.append(_told(subject, "quarantined", key, reason))
    return records


def _told(subject: Subject, kind: str, key: str, reason: str) -> dict[str, object]:
    return {"kind": kind, "key": key, "fingerprint": subject.fingerprint, "reason": reason}


def _free_name(path: Path) -> Path:
    """`journal.damaged-20260101-120000.jsonl`, not taken yet."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        more = f"-{number}" if number > 1 else ""
        name = path.with_name(f"{path.stem}.damaged-{stamp}{more}{path.suffix}")
        if not name.exists():
            return name
        number += 1
