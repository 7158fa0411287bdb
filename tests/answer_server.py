"""A server of OpenAI's API with a real tiny target behind it, which fails on purpose.

It is a process of its own, so it can be killed and started again on its port. What it was asked and
how it answered stands in its log, over all its lives.
"""

import asyncio
import base64
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Self

import torch
from aiohttp import web
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import paceline
from paceline.decode.generate import generate
from paceline.decode.sampling import Sampling
from paceline.recipe.schema import TargetRecipe
from paceline.target.chat import encode, load_tokenizer, render_text
from paceline.target.load import load_target

PRELOADED = (LlamaForCausalLM, PreTrainedTokenizerFast)
"""What a server would spend its first seconds on importing."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong. Prompts are named by the number that their first user turn begins with."""

    unavailable: float = 0.0
    """Share of requests that get a 503."""
    hangs: float = 0.0
    """Share that gets no answer."""
    cuts: float = 0.0
    """Share whose body breaks off."""
    garbage: float = 0.0
    """Share that gets a 200 with something else than JSON."""
    busy_first: int = 0
    """So many requests get a 429 first, with `Retry-After: 1`."""
    rejected: frozenset[int] = frozenset()
    """Prompts that get a 400."""
    mute: frozenset[int] = frozenset()
    """Prompts that get a 200 with an empty text."""
    poison: frozenset[int] = frozenset()
    """Prompts that get a 500."""
    stretched: frozenset[int] = frozenset()
    """Prompts of which the server says that it processed one token more."""
    slow: dict[int, float] = field(default_factory=dict)
    """Seconds before the answer to a prompt."""
    pause: float = 0.0
    """Seconds before any answer."""
    finishes: dict[int, str] = field(default_factory=dict)
    """Reasons that the server gives, whatever the answer is."""
    tells_ids: bool = True
    strips_end: bool = False
    """`token_ids` without the end token."""
    model: str = "toy"
    lists: tuple[str, ...] = ("toy",)
    key: str = ""
    """Needed as bearer token."""
    ends: frozenset[int] = frozenset({257})
    seed: int = 0


_NURSERY = """
import base64, os, pickle, sys
import answer_server, paceline.corpus.regenerate
for line in sys.stdin:
    word, what = line.split()
    if word == "wait":
        answer = os.waitstatus_to_exitcode(os.waitpid(int(what), 0)[1])
    elif not (answer := os.fork()):
        function, arguments = pickle.loads(base64.b64decode(what))
        function(*arguments)
        os._exit(0)
    print(answer, flush=True)
"""


class Nursery:
    """A process with all imports behind it, which forks others: none costs seconds to start."""

    def __init__(self) -> None:
        folders = (Path(paceline.__file__).parents[1], Path(__file__).parent)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _NURSERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
            text=True,
        )
        self._lock = threading.Lock()

    def start(self, function: Callable[..., None], *arguments: Any) -> int:
        """Call a module's function in a process of its own; its id."""
        return self._ask("start", base64.b64encode(pickle.dumps((function, arguments))).decode())

    def kill(self, pid: int) -> int:
        """SIGKILL; the exit code."""
        os.kill(pid, signal.SIGKILL)
        return self._ask("wait", str(pid))

    def _ask(self, word: str, what: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(f"{word} {what}\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())

    def close(self) -> None:
        """End it; what it has started goes on."""
        self._process.communicate()


class AnswerServer:
    """A server's process, and its log."""

    def __init__(self, nursery: Nursery, target: Path, log: Path, faults: Faults) -> None:
        self.faults = faults
        self.log = log
        self._nursery = nursery
        self._target = target
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        self._pid = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def start(self, **changed: Any) -> Self:
        """Start it, or start it again, with other faults where some are given; it then answers."""
        self.faults = replace(self.faults, **changed)
        self._pid = self._nursery.start(_serve, self._port, self._target, self.faults, self.log)
        end = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return self
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL."""
        if self._pid:
            self._nursery.kill(self._pid)
        self._pid = 0

    def events(self, what: str = "") -> list[dict[str, Any]]:
        """What the log says, all of it or of one kind."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        told = [json.loads(line) for line in lines]
        return [event for event in told if what in ("", event["what"])]

    def asked(self) -> Counter[int]:
        """How often each prompt was asked for."""
        return Counter(event["number"] for event in self.events() if event["what"] != "sent")


def _serve(port: int, target: Path, faults: Faults, log: Path) -> None:
    torch.set_num_threads(1)
    asyncio.run(_Server(target, faults, log).run(port))


class _Server:
    def __init__(self, target: Path, faults: Faults, log: Path) -> None:
        self._faults = faults
        self._log = log.open("a")
        self._count = len(log.read_text().splitlines())
        self._model = load_target(TargetRecipe(path=str(target))).model
        self._tokenizer = load_tokenizer(str(target))
        self._pool = ThreadPoolExecutor(1)

    async def run(self, port: int) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        await asyncio.Event().wait()

    async def _models(self, request: web.Request) -> web.Response:
        if refusal := self._keyless(request):
            return refusal
        return web.json_response({"data": [{"id": name} for name in self._faults.lists]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        prompt = asked["prompt"]
        found = re.search(r"user\n(\d+) ", self._tokenizer.decode(prompt))
        assert found is not None
        return await self._answer(request, asked, int(found[1]), prompt)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        text = render_text(
            self._tokenizer,
            asked["messages"],
            asked.get("tools"),
            asked.get("chat_template_kwargs", {}),
            generation_prompt=True,
        )
        prompt = encode(self._tokenizer, text)
        number = int(asked["messages"][0]["content"].split()[0])
        return await self._answer(request, asked, number, prompt)

    async def _answer(
        self, request: web.Request, asked: dict[str, Any], number: int, prompt: list[int]
    ) -> web.StreamResponse:
        faults, self._count = self._faults, self._count + 1
        draw = Random(f"{faults.seed}:{self._count}").random
        seed = asked.get("seed")
        if refusal := self._keyless(request):
            return refusal
        if asked["model"] != faults.model:
            return _error(404, f"The model `{asked['model']}` does not exist.")
        if self._count <= faults.busy_first:
            self._note(number, "busy", seed)
            return _error(429, "too many requests", {"Retry-After": "1"})
        if number in faults.rejected:
            self._note(number, "rejected", seed)
            return _error(400, f"prompt {number} is not to this server's taste")
        if number in faults.poison:
            self._note(number, "poison", seed)
            return _error(500, "EngineCore encountered an issue")
        for share, what in (
            (faults.unavailable, "unavailable"),
            (faults.hangs, "hang"),
            (faults.cuts, "cut"),
            (faults.garbage, "garbage"),
        ):
            if draw() < share:
                self._note(number, what, seed)
                return await self._fail(request, what)
        self._note(number, "asked", seed)
        if number in faults.mute:
            return web.json_response({"choices": [{"text": "", "finish_reason": "stop"}]})
        await asyncio.sleep(faults.slow.get(number, faults.pause))
        loop = asyncio.get_running_loop()
        body = await loop.run_in_executor(self._pool, self._body, asked, number, prompt)
        self._note(number, "sent", seed)
        return web.json_response(body)

    async def _fail(self, request: web.Request, what: str) -> web.StreamResponse:
        if what == "unavailable":
            return _error(503, "no room at the moment")
        if what == "garbage":
            return web.Response(text="<html>a proxy says hello</html>")
        if what == "hang":
            await asyncio.sleep(3600)
        response = web.StreamResponse(headers={"Content-Length": "4000"})
        await response.prepare(request)
        await response.write(b'{"choices": [{"text": "')
        assert request.transport is not None
        request.transport.abort()
        return response

    def _body(self, asked: dict[str, Any], number: int, prompt: list[int]) -> dict[str, Any]:
        faults = self._faults
        [answer] = generate(
            self._model,
            [prompt],
            max_new_tokens=asked["max_tokens"],
            eos_ids=faults.ends,
            sampling=Sampling(temperature=asked["temperature"], top_p=asked["top_p"]),
            seed=asked["seed"],
        )
        ids = list(answer.ids)
        finish = faults.finishes.get(number, answer.finish)
        if finish == "stop" and answer.finish == "length":
            # The end token that is left out has its place within the limit.
            ids = ids[:-1]
        written = ids[:-1] if answer.finish == "stop" else ids
        choice: dict[str, Any] = {"finish_reason": finish}
        text = self._tokenizer.decode(written, skip_special_tokens=True)
        is_chat = "messages" in asked
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        body: dict[str, Any] = {"object": "completion", "choices": [choice]}
        if faults.tells_ids and asked.get("return_token_ids"):
            choice["token_ids"] = written if faults.strips_end else ids
            processed = [*prompt, 10] if number in faults.stretched else prompt
            (body if is_chat else choice)["prompt_token_ids"] = processed
        return body

    def _keyless(self, request: web.Request) -> web.Response | None:
        key = self._faults.key
        if not key or request.headers.get("Authorization") == f"Bearer {key}":
            return None
        return _error(401, "Unauthorized")

    def _note(self, number: int, what: str, seed: int | None) -> None:
        self._log.write(json.dumps({"number": number, "what": what, "seed": seed}) + "\n")
        self._log.flush()


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status, headers=headers)
