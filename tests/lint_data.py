"""Data with faults of every kind, for the tests of `paceline lint`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fixtures_chatml import END, byte_chatml, turns
from fixtures_corpus import recipe_of, write_jsonl
from paceline.corpus.lint.findings import findings
from paceline.corpus.lint.lint import Lint, lint
from paceline.corpus.lint.wording import Finding

HOSTILE = "<script>alert('x')</script>&amp;"


def chats(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"messages": turns(f"u:question {i}?|a:The answer to it is {i}.")}
        for i in range(start, start + count)
    ]


def faulty() -> list[Any]:
    """Rows good and bad: a third is left out, for fourteen reasons; one is blank."""
    ids = byte_chatml().encode("some text")
    return [
        *chats(20),
        *chats(2),
        {"messages": turns("u:question 3?|a:Something else.")},
        {"messages": turns(f"u:{HOSTILE}|a:{HOSTILE}")},
        {"messages": turns("u:bare")},
        {"messages": turns("u:empty|a:")},
        {"messages": [*turns("u:x"), {"role": "assistant", "content": f"an end{END} and more"}]},
        {"messages": turns("a:nobody asked")},
        {"messages": [{"role": "expert", "content": "x"}]},
        {"messages": []},
        {"messages": "no list"},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"hostile": HOSTILE},
        {"input_ids": ids},
        {"input_ids": ids, "loss_mask": [0] * len(ids)},
        {"messages": turns(f"u:{'long ' * 200}|a:too long")},
        {"messages": turns(f"u:cut|a:{'word ' * 200}")},
        b'{"messages": [{"role": "us',
        b"\xff\xfe",
        b"",
        b"[1, 2]",
    ]


def source(folder: Path, name: str, rows: Sequence[Any]) -> Path:
    return write_jsonl(folder / f"{name}.jsonl", rows)


def linted(folder: Path, rows: Sequence[Any], **settings: Any) -> Lint:
    """The lint of one source called `data`, all of it for training."""
    return lint(recipe_of(folder, source(folder, "data", rows), **settings))


def found(folder: Path, rows: Sequence[Any], **settings: Any) -> list[Finding]:
    return findings(linted(folder, rows, **settings))


def titles(some: Sequence[Finding], level: str | None = None) -> str:
    return "\n".join(f.title for f in some if level in (None, f.level))


def tokens_row(text: str, mask: Sequence[int]) -> dict[str, Any]:
    return {"input_ids": byte_chatml().encode(text), "loss_mask": list(mask)}


def dumped(rows: Sequence[Any]) -> list[bytes]:
    return [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
