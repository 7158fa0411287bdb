"""What extraction costs beside the target's own work: `measure()`.

The bare forward pass, up to the last layer that is needed and with nothing kept, runs in turns
with the whole of a worker's unit (reading the rows, capture, conversion, check, coding, shard
written and read back) and, where the store is one, its upload to a SeaweedFS on loopback with the
look at what has arrived. All of them take the same batches, on one thread, and are compared by
this process's CPU time, that of all its threads; the server's is its own.
"""

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.durable.iowatch import IoWatch
from paceline.durable.object_store import ObjectStore
from paceline.durable.uploader import Uploaded, Uploader
from paceline.extract.job import Job, UnitWork
from paceline.extract.worker import open_worker
from paceline.features.codec import Codec
from paceline.features.plan import Unit, plan_units
from paceline.flow.units import Task, WorkerContext
from paceline.recipe.schema import TargetRecipe
from paceline.target.load import Target, load_target
from paceline.target.taps import default_taps
from paceline.types import Sample, Split
from paceline.types.rows import index_rows, read_rows
from paceline.types.sample import encode_sample

ROOT = Path(__file__).resolve().parents[1]
REAL_TARGET, TEXT = ROOT / ".cache" / "smollm2", ROOT / ".cache" / "prompts"

_CASES: tuple[tuple[str, Codec, bool, float], ...] = (
    ("local", "none", False, 0.95),
    ("s3_none", "none", True, 0.85),
    ("s3_planes", "planes", True, 0.80),
)
_ROUNDS = 8
_SAMPLES, _SHORTEST, _LONGEST = 6, 120, 500
_BATCH_TOKENS = 1024
_VOCAB, _LAYERS, _HIDDEN = 49152, 30, 576


def measure() -> list[dict[str, Any]]:
    """Tokens per CPU second of extraction over those of the bare forward pass, three ways."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(_one_thread())
        store = stack.enter_context(_object_store())
        is_real = REAL_TARGET.is_dir() and TEXT.is_dir()
        model, samples, what = _target_and_samples(folder, is_real=is_real)
        (folder / "corpus.jsonl").write_bytes(b"".join(map(encode_sample, samples)))
        bench = _Bench(folder, model, store)
        ratios = bench.ratios()
    return [
        {
            "name": f"extract_efficiency_{name}",
            "value": round(statistics.median(found), 4),
            "unit": "ratio",
            "target": target,
            # A random target's activations say nothing of what a codec does.
            "ok": is_real and statistics.median(found) >= target,
            "how": (
                f"median of {_ROUNDS} rounds ({min(found):.3f} to {max(found):.3f}) of CPU time "
                "of the bare forward pass up to the last tapped layer over that of capture, "
                f"conversion to bfloat16, codec {codec}, shard written and verified"
                + (", upload to SeaweedFS on loopback and its verification" if remote else "")
                + f", of the same batches; one thread, fp32, 3 taps, {what}"
            ),
        }
        for (name, codec, remote, target), found in zip(_CASES, ratios, strict=True)
    ]


class _Bench:
    """One unit, in each of the ways it can be made."""

    def __init__(self, folder: Path, model: Path, store: ObjectStore) -> None:
        self._folder = folder
        self._store = store
        recipe = TargetRecipe(path=str(model))
        self._target = load_target(recipe)
        spec = self._target.spec
        corpus = folder / "corpus.jsonl"
        rows = index_rows(corpus, vocab_size=spec.vocab_size, max_position=spec.max_position)
        (unit,) = plan_units(
            rows.lengths, bytes_per_token=1, shard_bytes=1 << 30, batch_tokens=_BATCH_TOKENS
        )
        self._positions = [int(position) for position in rows.positions]
        self._job = Job(
            target=recipe,
            identity=spec.identity,
            corpus=corpus,
            layer_ids=default_taps(spec.num_layers, 3),
            last=False,
            dtype="bfloat16",
            codec="none",
            fingerprint="",
            check_positions=tuple(self._positions[:1]),
        )
        self._task = Task(
            index=0,
            key=unit.key,
            num_bytes=1 << 30,
            tokens=sum(int(length) for length in rows.lengths),
            payload=UnitWork(
                positions=tuple(self._positions[s] for s in unit.samples),
                batches=tuple(map(len, unit.batches)),
            ),
        )
        self._batches = _rectangles(read_rows(corpus, self._positions), unit)

    def ratios(self) -> list[list[float]]:
        """For each case, one of each round."""
        makers = [self._maker(codec, remote) for _, codec, remote, _ in _CASES]
        self._bare()
        for make in makers:
            make()
        # Each is compared with the passes right before and after it: a machine that others use
        # changes its pace over seconds.
        found: list[list[float]] = [[] for _ in makers]
        before = self._bare()
        for _ in range(_ROUNDS):
            for place, make in enumerate(makers):
                cost = make()
                after = self._bare()
                found[place].append((before + after) / 2 / cost)
                before = after
        return found

    def _maker(self, codec: Codec, remote: bool) -> Callable[[], float]:
        context = WorkerContext(0, IoWatch(), lambda _state: None)
        handle = open_worker(replace(self._job, codec=codec), context)
        path = self._folder / codec / self._task.key
        uploader = Uploader(self._store, concurrency=1) if remote else None

        def make() -> float:
            started = time.process_time()
            made = handle(self._task, path)
            if uploader is not None:
                uploader.submit(self._task.key, path, made.stat)
                while not (ended := uploader.poll()):
                    time.sleep(0.002)
                if not isinstance(ended[0], Uploaded):
                    raise RuntimeError(f"the upload failed: {ended[0]}")
            return time.process_time() - started

        return make

    @torch.no_grad()
    def _bare(self) -> float:
        """CPU seconds of the layers up to the last tap, with nothing kept."""
        started = time.process_time()
        decoder: Any = self._target.decoder
        every = decoder.layers
        decoder.layers = every[: self._job.layer_ids[-1] + 1]
        try:
            for ids in self._batches:
                decoder(input_ids=ids, use_cache=False)
        finally:
            decoder.layers = every
        return time.process_time() - started


def _rectangles(samples: list[Sample], unit: Unit) -> list[torch.Tensor]:
    """Right-padded; in causal attention that needs no mask, and one would only cost time."""
    made = []
    for batch in unit.batches:
        rows = [samples[s].input_ids for s in batch]
        longest = max(map(len, rows))
        made.append(torch.tensor([row + [0] * (longest - len(row)) for row in rows]))
    return made


def _target_and_samples(folder: Path, *, is_real: bool) -> tuple[Path, list[Sample], str]:
    """The demo's target on text of its prompts; a random one on random tokens without it."""
    rng = random.Random(0)
    lengths = [rng.randint(_SHORTEST, _LONGEST) for _ in range(_SAMPLES)]
    if is_real:
        tokens = _text_tokens(load_target(TargetRecipe(path=str(REAL_TARGET))), sum(lengths))
        what = "SmolLM2-135M-Instruct on text"
        model = REAL_TARGET
    else:
        model = folder / "target"
        _save_random_model(model)
        tokens = [rng.randrange(_VOCAB) for _ in range(sum(lengths))]
        what = "random Llama of SmolLM2-135M's shape (`make fetch` brings the real one)"
    samples = []
    for number, length in enumerate(lengths):
        samples.append(
            Sample(
                sample_id=f"{number:032x}",
                prompt_id=f"{number:032x}",
                source="made",
                split=Split.TRAIN,
                messages=[],
                input_ids=tokens[:length],
                loss_spans=[(50, 100)],
            )
        )
        tokens = tokens[length:]
    return model, samples, what


def _text_tokens(target: Target, count: int) -> list[int]:
    tokens: list[int] = []
    for line in (TEXT / "writingbench_en.jsonl").read_text(encoding="utf-8").splitlines():
        text = json.loads(line)["messages"][0]["content"]
        tokens += target.tokenizer(text)["input_ids"]
        if len(tokens) >= count:
            return tokens
    raise ValueError(f"{TEXT}: fewer than {count} tokens")


def _save_random_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCAB,
        num_hidden_layers=_LAYERS,
        hidden_size=_HIDDEN,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@contextmanager
def _object_store() -> Iterator[ObjectStore]:
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        from seaweed import running_seaweed
    finally:
        sys.path.remove(str(ROOT / "tests"))
    with running_seaweed() as server, server.credentials():
        yield ObjectStore(server.url("bench"), server.options)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    for line in measure():
        print(json.dumps(line))
