"""What `paceline doctor` finds: one sentence each of what, why and how to mend it."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

SCHEMA_VERSION = 1
"""Of `paceline doctor --json`; a key is never renamed or removed within a version."""


class Severity(StrEnum):
    """How much a finding matters; in this order, the worst first."""

    ERROR = "error"
    """The run will fail, or be lost."""
    WARNING = "warning"
    """It may fail, or will be slow."""
    NOTE = "note"
    """Worth knowing, or not looked at, with the reason."""
    OK = "ok"
    """Looked at, and as it should be."""


_ORDER = tuple(Severity)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the answer."""

    check: str
    """Name of the kind of check, such as `gpus`."""
    severity: Severity
    what: str
    """What is the case; a sentence without its full stop."""
    why: str = ""
    """Why it matters; empty where nothing is wrong."""
    mend: str = ""
    """The command that mends it, or what to do where no command can; empty where nothing is to."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Everything that was found; the object that `--json` prints."""

    schema_version: int
    recipe: str
    """Path of the recipe."""
    run: str
    """Path of the run directory, which need not exist."""
    seconds: float
    """How long the looking took."""
    counts: dict[str, int]
    """Findings by severity, all four of them."""
    findings: tuple[Finding, ...]
    """The worst first."""

    @classmethod
    def of(
        cls, findings: Iterable[Finding], *, recipe: str, run: str, seconds: float
    ) -> "Diagnosis":
        """Sorted by severity; within one, as given."""
        ordered = tuple(sorted(findings, key=lambda f: _ORDER.index(f.severity)))
        counts = {s.value: sum(f.severity is s for f in ordered) for s in Severity}
        return cls(
            schema_version=SCHEMA_VERSION,
            recipe=recipe,
            run=run,
            seconds=round(seconds, 3),
            counts=counts,
            findings=ordered,
        )

    def exit_code(self, *, strict: bool = False) -> int:
        """1 where there is an error, or, if `strict`, a warning; else 0."""
        bad = self.counts[Severity.ERROR] + (self.counts[Severity.WARNING] if strict else 0)
        return 1 if bad else 0


@dataclass(frozen=True)
class Finder:
    """Makes the findings of one check."""

    check: str

    def error(self, what: str, why: str, mend: str) -> Finding:
        """The run will fail, or be lost."""
        return self._finding(Severity.ERROR, what, why, mend)

    def warning(self, what: str, why: str, mend: str) -> Finding:
        """It may fail, or will be slow."""
        return self._finding(Severity.WARNING, what, why, mend)

    def note(self, what: str, why: str = "", mend: str = "") -> Finding:
        """Worth knowing, or not looked at."""
        return self._finding(Severity.NOTE, what, why, mend)

    def ok(self, what: str) -> Finding:
        """As it should be."""
        return self._finding(Severity.OK, what, "", "")

    def _finding(self, severity: Severity, what: str, why: str, mend: str) -> Finding:
        return Finding(check=self.check, severity=severity, what=what, why=why, mend=mend)
