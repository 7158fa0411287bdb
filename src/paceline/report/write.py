"""Write the report of a run."""

from pathlib import Path

from paceline.durable.errors import UserError
from paceline.durable.fs import write_atomic
from paceline.recipe.run_dir import RunDir
from paceline.report.collect import collect, inputs
from paceline.report.page import MARK, render


def write_report(run_dir: RunDir, out: Path | None = None) -> Path:
    """Write the page of a run, in whatever state it is; return where (`report.html` in the run).

    Raises UserError where there is no run, or another file stands where the report would go;
    IntegrityError where a record or the result is not as it was written; OSError.
    """
    path = out or run_dir.report
    if path.is_dir():
        raise UserError(f"{path}: a folder. Name a file, such as {path / run_dir.report.name}.")
    if path.exists() and not _is_report(path):
        raise UserError(
            f"{path} is no report that paceline wrote, and would be replaced. Move it away, or "
            "choose another name with `paceline report RUN --out FILE`."
        )
    write_atomic(path, render(collect(run_dir)))
    return path


def is_current(run_dir: RunDir) -> bool:
    """Whether the run has a report that is newer than everything it is made from."""
    path = run_dir.report
    if not path.is_file() or not _is_report(path):
        return False
    written = path.stat().st_mtime_ns
    return all(source.stat().st_mtime_ns < written for source in inputs(run_dir))


def _is_report(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MARK)) == MARK
