"""A real vLLM on the CPU, with a real target, answers as this process does."""

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError

import pytest
import torch

from checkout import ROOT
from paceline.corpus.mask import Renderer
from paceline.corpus.regenerate import run
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import CorpusRecipe, Recipe, RegenerateRecipe, TargetRecipe
from paceline.rows.ids import prompt_id, sample_id
from paceline.target.chat import load_tokenizer
from paceline.target.load import load_target
from paceline.types import Sample, Split
from paceline.types.sample import encode_sample, read_samples

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TARGET = ROOT / ".cache" / "smollm2"
QUESTIONS = (
    "What is the capital of France?",
    "Say hello.",
    "List three primes below 2024.",
    "Write a haiku about rain.",
    "Was ist 17 mal 3?",
    "Name a colour. One word.",
)
NEAR = 1e-3
"""Two logits that lie as close as this may change places between two engines in fp32."""


@pytest.fixture(scope="module")
def server(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not TARGET.is_dir():
        pytest.skip(f"NOT RUN: no target in {TARGET}; make it with `make fetch`")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    log = tmp_path_factory.mktemp("engine") / "vllm.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [
                str(engine), "-m", "vllm.entrypoints.openai.api_server",
                "--model", str(TARGET), "--served-model-name", "smollm2",
                "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
                "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4",
            ],
            stdout=file,
            stderr=file,
            env=own | settings,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}/v1"
    end = time.monotonic() + 600
    try:
        while not answers(f"{url}/models"):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (URLError, OSError):
        return False


def make_run(folder: Path) -> RunDir:
    """A prepared corpus of the questions."""
    run_dir = RunDir(folder)
    renderer = Renderer.of(load_tokenizer(str(TARGET)), {}, TARGET)
    run_dir.corpus.mkdir(parents=True)
    samples = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        samples.append(
            Sample(
                sample_id=sample_id(messages, None, renderer.identity),
                prompt_id=prompt_id(messages, None),
                source="questions",
                split=Split.TRAIN,
                messages=messages,
                input_ids=renderer.prompt(messages, None),
                loss_spans=[],
            )
        )
    run_dir.prepared.write_bytes(b"".join(map(encode_sample, samples)))
    return run_dir


def recipe_of(**options) -> Recipe:
    return Recipe(
        target=TargetRecipe(path=str(TARGET)),
        corpus=CorpusRecipe(max_length=256),
        regenerate=RegenerateRecipe(max_new_tokens=40, on_loop="keep", on_length="keep", **options),
    )


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    run_dir = make_run(tmp_path_factory.mktemp("here") / "run")
    run(recipe_of(), run_dir)
    return list(read_samples(run_dir.regenerated))


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_real_engine_tells_the_tokens_that_the_target_chooses(tmp_path, server, in_process, api):
    """Equal token for token, up to the first place where two tokens are as good as each other."""
    run_dir = make_run(tmp_path / "run")
    report = run(recipe_of(servers=(server,), api=api, concurrency=4), run_dir)
    served = report.numbers["served"]
    assert served["model"] == "smollm2"
    assert served["retokenised"] == served["unchecked_prompts"] == 0
    assert report.numbers["quarantined"] == 0
    got = list(read_samples(run_dir.regenerated))
    assert [sample.prompt_id for sample in got] == [sample.prompt_id for sample in in_process]
    model = load_target(TargetRecipe(path=str(TARGET))).model
    equal = compared = 0
    for theirs, ours in zip(got, in_process, strict=True):
        start = theirs.loss_spans[0][0]
        assert theirs.input_ids[:start] == ours.input_ids[:start]
        pairs = list(zip(theirs.input_ids, ours.input_ids, strict=False))
        parted = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        compared += len(pairs) - start
        equal += (len(pairs) if parted is None else parted) - start
        if parted is None:
            assert theirs == ours
            continue
        with torch.inference_mode():
            logits = model(torch.tensor([ours.input_ids[:parted]])).logits[0, -1]
        gap = float(logits[ours.input_ids[parted]] - logits[theirs.input_ids[parted]])
        assert 0 <= gap < NEAR, f"token {parted - start}: {gap}"
    print(f"{api}: {equal} of {compared} tokens equal; finish {report.numbers['finish']}")
    print("\n".join(report.lines))
    assert equal >= 6 * len(QUESTIONS)


def test_what_the_engine_refuses_is_quarantined_with_its_words(tmp_path, server):
    """A prompt that is longer than the engine reads, which this process does not know of."""
    run_dir = make_run(tmp_path / "run")
    samples = list(read_samples(run_dir.prepared))
    messages = [{"role": "user", "content": "rain " * 600}]
    renderer = Renderer.of(load_tokenizer(str(TARGET)), {}, TARGET)
    long = Sample(
        sample_id=sample_id(messages, None, renderer.identity),
        prompt_id=prompt_id(messages, None),
        source="questions",
        split=Split.TRAIN,
        messages=messages,
        input_ids=renderer.prompt(messages, None),
        loss_spans=[],
    )
    run_dir.prepared.write_bytes(b"".join(map(encode_sample, [samples[0], long])))
    recipe = Recipe(
        target=TargetRecipe(path=str(TARGET)),
        corpus=CorpusRecipe(max_length=1024),
        regenerate=RegenerateRecipe(
            max_new_tokens=8, on_length="keep", servers=(server,), concurrency=1
        ),
    )
    report = run(recipe, run_dir)
    assert report.numbers["reasons"] == {"server_rejected": 1}
    listed = (run_dir.corpus / "regenerate-quarantine.jsonl").read_text()
    print(listed)
    assert "status 400" in listed
