"""Report pages taken apart, and the tiny run that they are made of."""

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tiny_run import tiny_project

HOSTILE = "<script>alert(1)</script>&amp;"

_VOID = {"meta", "link", "br", "img", "hr", "input"}


@dataclass
class Page(HTMLParser):
    """What a page holds; raises AssertionError where an element is not closed by its own end."""

    source: str
    open: list[str] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    """By the chart's name."""
    tokens: list[list[tuple[str, str]]] = field(default_factory=list)
    """Each coloured answer: (class, text) of its pieces."""
    words: str = ""
    """All text that is no script or style."""

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._chart: str | None = None
        self._in_tokens = False
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag not in _VOID:
            self.open.append(tag)
        self._chart = given.get("data-chart") if tag == "script" else self._chart
        if given.get("class") == "tokens":
            self.tokens.append([])
            self._in_tokens = True
        elif tag == "span" and self._in_tokens:
            self.tokens[-1].append((given.get("class") or "", ""))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()
        if tag == "script":
            self._chart = None
        if tag == "div":
            self._in_tokens = False

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            if self._chart is not None:
                self.figures[self._chart.removeprefix("chart-")] = json.loads(data)
            return
        if self.open and self.open[-1] == "style":
            return
        self.words += data
        if self._in_tokens:
            kind, text = self.tokens[-1][-1]
            self.tokens[-1][-1] = (kind, text + data)

    @property
    def ids(self) -> set[str]:
        return {given["id"] or "" for _, given in self.tags if "id" in given}


def page_of(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def report_project(root: Path) -> Path:
    """A tiny project with a hostile name and a row that is quarantined; return the recipe."""
    path = tiny_project(root)
    with (root / "train.jsonl").open("a") as rows:
        rows.write(json.dumps({"messages": [{"role": "user", "content": ""}], "x": HOSTILE}) + "\n")
        rows.write(f"no JSON: {HOSTILE}\n\n")
    recipe = json.loads(path.read_text())
    recipe["corpus"]["sources"][1]["name"] = HOSTILE
    recipe["score"] = {"max_new_tokens": 24, "budgets": [64], "walk_budgets": [256]}
    recipe["train"]["learning_rate"] = 0.01
    recipe["train"]["epochs"] = 8
    path.write_text(json.dumps(recipe))
    return path
