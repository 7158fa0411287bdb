"""Going on with an extraction of a million samples: seconds and memory before the first new unit.

Corpus, store and journal are made first, outside the measurement: the shards are real ones with
tiny hidden states. Measured in a process of its own is what a resume does: the corpus's digest,
its index, the plan, the journal, the survey of the store with every byte that a start reads.
`paceline plan` and `paceline status` are measured on the same run, as commands.
"""

import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import paceline
from paceline.durable.crash import UnsyncedFs
from paceline.durable.journal import fold, journal_bytes
from paceline.durable.store import LocalStore
from paceline.extract.destination import DEEP_BYTES
from paceline.extract.layout import JOURNAL, Layout
from paceline.extract.ledger import survey, verified_record
from paceline.features.format import Tensor, json_text, write_tensors
from paceline.features.plan import Unit
from paceline.recipe.fingerprint import digest_file
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import (
    CorpusRecipe,
    ExtractRecipe,
    Recipe,
    RegenerateRecipe,
    SourceRecipe,
    TargetRecipe,
)
from paceline.recipe.stage import StageRecord
from paceline.recipe.write import write_recipe
from paceline.types.row_index import FILE_NAME, open_rows
from paceline.types.rows import Rows
from paceline.watch.events import Counts, EventWriter

TARGET_SECONDS = 5.0
TARGET_MEGABYTES = 500
TARGET_STATUS_SECONDS = 0.5

_SAMPLES = 1_000_000
_SAMPLES_A_UNIT = 250
_LENGTHS = (50, 64)
_TEXTS = 4000
"""Different token lists; rows repeat them under ids of their own."""

_VOCAB = 151_936
_LIMITS: dict[str, Any] = {"vocab_size": _VOCAB, "max_position": 4096}
_TIMES = 3
_MADE = {"made": "by the benchmark"}

_LAYOUT = Layout(
    target_identity="t",
    hidden_size=1,
    layer_ids=(1,),
    last=False,
    dtype="bfloat16",
    codec="none",
    shard_bytes=_SAMPLES_A_UNIT * sum(_LENGTHS),
)
"""2 bytes a token and 57 tokens a sample: shards of about 250 samples."""

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _LAYOUT.hidden_size,
    "intermediate_size": 4,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 1,
    "num_hidden_layers": 30,
    "max_position_embeddings": 4096,
    "vocab_size": _VOCAB,
    "torch_dtype": "bfloat16",
}
"""What `plan` reads of a target."""


def measure() -> list[dict[str, Any]]:
    """Seconds of a first start, seconds and megabytes of a resume, seconds of `status`."""
    with tempfile.TemporaryDirectory() as name:
        run = RunDir(Path(name) / "run")
        fingerprint = _make_run(run)
        first = _resumed(run, fingerprint)
        times = [_resumed(run, fingerprint) for _ in range(_TIMES)]
        size = run.prepared.stat().st_size
        status = min(_status_seconds(run) for _ in range(_TIMES))
        planning = min(_planning(run) for _ in range(_TIMES))
    best = min(times, key=lambda found: found["seconds"])
    megabytes = max(found["megabytes"] for found in (first, *times))
    how = (
        f"a process of its own on {_SAMPLES:,} samples ({size / 1e6:.0f} MB of corpus) in "
        f"{best['units']:,} shards: digest {best['digest']:.2f}, index {best['index']:.2f}, plan "
        f"{best['plan']:.2f}, journal {best['journal']:.2f}, survey {best['survey']:.2f} s; the "
        f"best of {_TIMES}"
    )
    return [
        _said("resume_million", best["seconds"], "s", TARGET_SECONDS, how),
        _said(
            "resume_million_first",
            first["seconds"],
            "s",
            None,
            f"the same without the file of the index, which takes {first['index']:.2f} s to make; "
            f"{first['cpu_seconds']:.2f} s of one CPU in all, imports included",
        ),
        _said(
            "resume_million_memory",
            megabytes,
            "MB",
            TARGET_MEGABYTES,
            "peak resident size of those processes, the first included",
        ),
        _said(
            "status_million",
            status,
            "s",
            TARGET_STATUS_SECONDS,
            f"`paceline status` on that run, wall time of the command; the best of {_TIMES}",
        ),
        _said(
            "plan_million",
            planning[0],
            "s",
            TARGET_SECONDS,
            f"`paceline plan` on that run, wall time of the command; the best of {_TIMES}",
        ),
        _said(
            "plan_million_memory",
            planning[1],
            "MB",
            TARGET_MEGABYTES,
            "peak resident size of that process",
        ),
    ]


def _said(name: str, value: float, unit: str, target: float | None, how: str) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "target": target,
        "ok": target is None or value <= target,
        "how": how,
    }


def resume(run: RunDir, fingerprint: str) -> dict[str, float]:
    """What an extraction does before its first new unit; seconds of each part."""
    marks = [time.perf_counter()]
    digest = digest_file(run.prepared)
    marks.append(time.perf_counter())
    rows = open_rows(run.prepared, digest, **_LIMITS, index=run.features / FILE_NAME)
    marks.append(time.perf_counter())
    units = _LAYOUT.units(rows, 4096)
    marks.append(time.perf_counter())
    path = run.features / JOURNAL
    records = fold(path.read_bytes(), path).records
    marks.append(time.perf_counter())
    store = LocalStore(run.features)
    found = survey(
        records, store, units, rows, fingerprint, source=run.prepared, deep_bytes=DEEP_BYTES
    )
    marks.append(time.perf_counter())
    if len(found.done) != len(units) or found.adopted or found.redo:
        raise RuntimeError(f"{len(found.done)} of {len(units)} shards, {len(found.redo)} bad")
    parts = np.diff(marks).tolist()
    return {
        "units": len(units),
        "seconds": marks[-1] - marks[0],
        **dict(zip(("digest", "index", "plan", "journal", "survey"), parts, strict=True)),
    }


def _resumed(run: RunDir, fingerprint: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--resume", str(run.root), fingerprint],
        env={**os.environ, "PYTHONPATH": _source()},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def _status_seconds(run: RunDir) -> float:
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "status", str(run.root)],
        env={**os.environ, "PYTHONPATH": _source()},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - started
    if f"{_SAMPLES:,}" not in done.stdout and "1.0 M" not in done.stdout:
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout}{done.stderr}")
    return seconds


def _planning(run: RunDir) -> tuple[float, float]:
    """Seconds and megabytes."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "plan", "--run", str(run.root)],
        env={**os.environ, "PYTHONPATH": _source()},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        said = process.stdout.read() if process.stdout else ""
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if f"{_SAMPLES:,}" not in said:
        raise RuntimeError(f"exit code {process.returncode}: {said}")
    return time.perf_counter() - started, used.ru_maxrss / 1000


def _source() -> str:
    return str(Path(paceline.__file__).parents[1])


def _make_run(run: RunDir) -> str:
    run.corpus.mkdir(parents=True)
    sources = (SourceRecipe(path=str(run.root / "rows.jsonl")),)
    recipe = Recipe(
        target=TargetRecipe(path=str(run.root / "target")),
        corpus=CorpusRecipe(sources=sources),
        regenerate=RegenerateRecipe(enabled=False),
        extract=ExtractRecipe(
            taps=_LAYOUT.layer_ids, last=_LAYOUT.last, shard_bytes=_LAYOUT.shard_bytes
        ),
    )
    write_recipe(recipe, run.recipe)
    (run.root / "target").mkdir()
    (run.root / "target" / "config.json").write_text(json.dumps(_CONFIG))
    texts = list(_token_lists(random.Random(0)))
    prepared = StageRecord(run.corpus, "prepare", _MADE)
    prepared.begin()
    _write_corpus(run.prepared, texts)
    prepared.finish([run.prepared], {})
    digest = digest_file(run.prepared)
    fields = {
        "corpus": digest,
        "target.identity": _LAYOUT.target_identity,
        "target.dtype": recipe.target.dtype,
        "extract.layer_ids.0": _LAYOUT.layer_ids[0],
        "extract.last": _LAYOUT.last,
        "extract.dtype": _LAYOUT.dtype,
        "extract.shard_bytes": _LAYOUT.shard_bytes,
    }
    record = StageRecord(run.features, "extract", fields)
    record.begin()
    index = run.features / FILE_NAME
    rows = open_rows(run.prepared, digest, **_LIMITS, index=index)
    index.unlink()
    units = _LAYOUT.units(rows, 4096)
    _write_store(run, rows, units, texts, record.fingerprint)
    with EventWriter(run.events, "extract") as events:
        counts = Counts(unit="samples", total=_SAMPLES, tokens_total=rows.tokens)
        events.emit("start", counts)
        for unit in units:
            counts = Counts(unit="samples", total=_SAMPLES, done=unit.stop, rate=2582.0)
            events.emit("progress", counts)
    return record.fingerprint


def _token_lists(rng: random.Random) -> Iterator[list[int]]:
    for _ in range(_TEXTS):
        yield [rng.randrange(_VOCAB) for _ in range(rng.randint(*_LENGTHS))]


def _write_corpus(path: Path, texts: list[list[int]]) -> None:
    middles = [
        f'","source":"made","split":"train","messages":[{{"role":"user","content":"Which number '
        f'comes behind {n}?"}},{{"role":"assistant","content":"It is {n + 1}, as ever."}}],'
        f'"tools":null,"input_ids":{json.dumps(ids, separators=(",", ":"))},'
        f'"loss_spans":[[{len(ids) // 2},{len(ids)}]],"finish":null}}\n'
        for n, ids in enumerate(texts)
    ]
    with path.open("w", encoding="ascii") as file:
        for number in range(_SAMPLES):
            sample_id = hashlib.md5(b"%d" % number, usedforsecurity=False).hexdigest()
            middle = middles[number % len(middles)]
            file.write(f'{{"sample_id":"{sample_id}","prompt_id":"{sample_id[::-1]}{middle}')


def _write_store(
    run: RunDir, rows: Rows, units: tuple[Unit, ...], texts: list[list[int]], fingerprint: str
) -> None:
    arrays = [np.asarray(ids, dtype="<i4") for ids in texts]
    fs = UnsyncedFs()
    store = LocalStore(run.features, fs=fs)
    records = []
    for unit in units:
        order = list(unit.samples)
        lengths = rows.lengths[order]
        total = int(lengths.sum())
        offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        ids = np.concatenate([arrays[sample % len(arrays)] for sample in order])
        place = np.arange(total) - np.repeat(offsets[:-1], lengths)
        mask = (place >= np.repeat(lengths // 2, lengths)).astype(np.uint8)
        tensors: dict[str, Tensor] = {
            "offsets": ("I64", [len(order) + 1], offsets.astype("<i8").tobytes()),
            "input_ids": ("I32", [total], ids.tobytes()),
            "taps": ("BF16", [total, 1, 1], bytes(2 * total)),
            "loss_mask": ("U8", [total], mask.tobytes()),
        }
        metadata = {
            "kind": "paceline.features",
            "version": "1",
            "fingerprint": fingerprint,
            "layer_ids": "[1]",
            "layer_convention": "output_after_layer",
            "last": "absent",
            "sample_ids": json_text(rows.sample_ids.take(order)),
        }
        stat = write_tensors(store.path(unit.key), tensors, metadata, fs=fs)
        records.append(verified_record(unit, stat, fingerprint))
    (run.features / JOURNAL).write_bytes(journal_bytes(records))


def _print_resume(root: str, fingerprint: str) -> None:
    found = resume(RunDir(Path(root)), fingerprint)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps(found | {"megabytes": kilobytes / 1000, "cpu_seconds": time.process_time()}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--resume"]:
        _print_resume(*sys.argv[2:])
    else:
        print(json.dumps(measure(), indent=1))
