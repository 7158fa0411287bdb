"""Generation groups: which prompts are answered together, and their answers at rest.

A group is the unit of work that is committed and redone. Which prompts it holds is a function of
the prepared corpus and the group size alone, so an interrupted run and its resumption compute the
same batches, and with them the same answers to the last bit.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from paceline.durable.checksum import crc64, crc64_hex
from paceline.durable.errors import DataError, IntegrityError
from paceline.durable.fs import remove_dead_partials, write_atomic
from paceline.durable.journal import Journal
from paceline.recipe.fingerprint import digest_file
from paceline.types import Sample, Split


@dataclass(frozen=True, slots=True)
class Line:
    """Where a line lies in a file, in bytes."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True, repr=False)
class Group:
    """Prompts that are answered together."""

    number: int
    lines: tuple[Line, ...]
    """Of the prompts in the prepared corpus."""

    def __repr__(self) -> str:
        return f"group {self.number}, {len(self.lines)} prompts"


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target said to one prompt."""

    prompt_id: str
    ids: list[int]
    """With the end token last where `finish` is "stop"."""
    finish: str


def plan_groups(prepared: Path, group_size: int) -> list[Group]:
    """Group the prompts that are to be answered, all but the held-out ones.

    Prompts of like length come together, so that a batch pads little; the longest come first, so
    that memory runs out at once or never, and workers end at about the same time. Raises
    DataError for a damaged corpus.
    """
    entries = [
        (-len(sample.input_ids), sample.prompt_id, line)
        for line, sample in located(prepared)
        if sample.split is not Split.HELDOUT
    ]
    entries.sort(key=lambda entry: entry[:2])
    return [
        Group(number, tuple(line for _, _, line in entries[start : start + group_size]))
        for number, start in enumerate(range(0, len(entries), group_size))
    ]


def read_prompts(prepared: Path, group: Group) -> list[Sample]:
    """The samples of a group, in its order."""
    decoder = msgspec.json.Decoder(Sample)
    with prepared.open("rb") as file:
        return [decoder.decode(_read(file, line)) for line in group.lines]


def read_prompt(prepared: BinaryIO, line: Line) -> Sample:
    """One sample of the open corpus."""
    return msgspec.json.decode(_read(prepared, line), type=Sample)


class AnswerStore:
    """`answers/group-00012.jsonl`, one line per prompt, and the journal that says what is done.

    A file counts when the journal has its checksum under the fingerprint of this very stage;
    whatever else lies there is redone. One process at a time: raises UserError where another
    has the journal open.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self._folder = folder / "answers"
        self._fingerprint = fingerprint
        self._journal = Journal(folder / "regenerate.journal")
        remove_dead_partials(self._folder)

    @staticmethod
    def holds_any(folder: Path) -> bool:
        """Whether any answers lie there, whatever made them."""
        return any((folder / "answers").glob("group-*.jsonl"))

    def path(self, group: Group) -> Path:
        """Where the group's answers lie."""
        return self._folder / f"group-{group.number:05d}.jsonl"

    def commit(self, group: Group, answers: Sequence[Answer]) -> None:
        """Make a group's answers durable, then count them as done."""
        data = b"".join(msgspec.json.encode(answer) + b"\n" for answer in answers)
        write_atomic(self.path(group), data)
        self._journal.append(
            {
                "kind": "answers",
                "fingerprint": self._fingerprint,
                "group": group.number,
                "digest": f"{crc64_hex(crc64(data))}-{len(data)}",
            }
        )

    def split_done(self, groups: Iterable[Group]) -> tuple[list[Group], list[Group], list[Group]]:
        """Sort groups into done, open, and damaged: journalled, but not as it was written.

        Reads every file that is done.
        """
        digests: dict[int, str] = {
            record["group"]: record["digest"]
            for record in self._journal.records
            if record.get("fingerprint") == self._fingerprint
        }
        done: list[Group] = []
        todo: list[Group] = []
        damaged: list[Group] = []
        for group in groups:
            path = self.path(group)
            if group.number not in digests:
                todo.append(group)
            elif path.is_file() and digest_file(path) == digests[group.number]:
                done.append(group)
            else:
                damaged.append(group)
        return done, todo, damaged

    def answers(self, group: Group) -> list[Answer]:
        """The answers of a group that is done, in its order."""
        decoder = msgspec.json.Decoder(Answer)
        return [decoder.decode(line) for line in self.path(group).read_bytes().splitlines()]

    def answered(
        self, prepared: Path, groups: Iterable[Group]
    ) -> Iterator[tuple[Sample, Answer | None]]:
        """Every sample of the prepared corpus in order, with its answer; None for held-out ones.

        All groups have to be done. Memory holds places, never texts. Raises IntegrityError where
        an answer is missing or another prompt's.
        """
        places: dict[int, tuple[Path, Line]] = {}
        for group in groups:
            path = self.path(group)
            answers = _lines(path)
            for prompt, answer in zip(group.lines, answers, strict=True):
                places[prompt.offset] = (path, answer)
        decoder = msgspec.json.Decoder(Answer)
        for line, sample in located(prepared):
            if sample.split is Split.HELDOUT:
                yield sample, None
                continue
            path, place = places[line.offset]
            with path.open("rb") as file:
                answer = decoder.decode(_read(file, place))
            if answer.prompt_id != sample.prompt_id:
                raise IntegrityError(
                    f"{path}: an answer to prompt {answer.prompt_id} stands where that to "
                    f"{sample.prompt_id} belongs. Remove {path} to have the group done again."
                )
            yield sample, answer

    def close(self) -> None:
        """Let another process have the journal."""
        self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def located(prepared: Path) -> Iterator[tuple[Line, Sample]]:
    """Every sample with its place. Raises DataError naming file and line."""
    decoder = msgspec.json.Decoder(Sample)
    with prepared.open("rb") as file:
        offset = 0
        for number, data in enumerate(file, start=1):
            try:
                yield Line(offset, len(data)), decoder.decode(data)
            except (msgspec.MsgspecError, UnicodeError) as error:
                raise DataError(
                    f"{prepared}, line {number}: not a sample ({error}). The file was damaged "
                    "after it was written: run prepare again."
                ) from error
            offset += len(data)


def _lines(path: Path) -> list[Line]:
    lines: list[Line] = []
    with path.open("rb") as file:
        offset = 0
        for data in file:
            lines.append(Line(offset, len(data)))
            offset += len(data)
    return lines


def _read(file: BinaryIO, line: Line) -> bytes:
    file.seek(line.offset)
    return file.read(line.size)
