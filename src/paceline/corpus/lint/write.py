"""Write the page of a lint."""

from pathlib import Path

from paceline.corpus.lint.page import MARK
from paceline.durable.errors import UserError
from paceline.durable.fs import write_atomic


def require_place(out: Path) -> None:
    """Refuse to replace what is no page of a lint. Raises UserError."""
    if out.is_dir():
        raise UserError(f"{out}: a folder. Name a file, such as {out / 'lint.html'}.")
    if out.exists() and not _is_page(out):
        raise UserError(
            f"{out} is no page that `paceline lint` wrote, and would be replaced. Move it away, or "
            "choose another name with `--out FILE`."
        )


def write_page(out: Path, page: bytes) -> None:
    """Put the page there, whole. Raises UserError as `require_place`, and OSError."""
    require_place(out)
    write_atomic(out, page)


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MARK)) == MARK
