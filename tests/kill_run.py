"""One extraction to be killed: the real stage, with a producer in place of the target.

Everything between recipe and manifest is the product's own. Put in its place are the worker's
setup, the store where it is to be a faulty one, and the watch, which tells where the process is.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import msgspec

from kill_marks import SUPERVISOR, Board, MarkedWatch, Order, Orders
from kill_producer import HIDDEN, LAYERS, VOCAB, Plan, Unit, open_producer, promised_stat
from paceline.durable.checksum import crc64
from paceline.durable.faulty import Fault, FaultyStore, by_chance
from paceline.durable.fs import remove_dead_partials
from paceline.durable.local_depot import LocalDepot
from paceline.durable.open_store import open_store
from paceline.durable.owner import owned
from paceline.durable.staged_depot import StagedDepot
from paceline.durable.store import LocalStore, Stat, Store
from paceline.durable.uploader import Uploader
from paceline.extract import destination as destinations
from paceline.extract import ledger, setting, software, stage, work
from paceline.extract.destination import Destination
from paceline.features.format import write_tensors
from paceline.features.plan import unit_key
from paceline.flow.supervisor import supervise
from paceline.flow.units import Outcome, Task
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import (
    CorpusRecipe,
    ExtractRecipe,
    Recipe,
    RegenerateRecipe,
    SourceRecipe,
    TargetRecipe,
)
from paceline.types.sample import Sample, Split, encode_sample

Kind = Literal["local", "faulty", "s3"]

Sabotage = Literal["", "hasty", "forgetful"]
"""`hasty` records units as verified before they are where they belong; `forgetful` makes again
what is done."""

WORKERS = 2
UPLOADS = 2
_STAGING_BYTES = 6 << 20
_PAUSE = 0.005
_FAULTS = {
    Fault.ERROR_BEFORE: 0.05,
    Fault.ERROR_AFTER: 0.05,
    Fault.TRUNCATED: 0.03,
    Fault.EMPTY: 0.02,
    Fault.STALL: 0.05,
}
_QUIET_FAULTS = {Fault.ERROR_BEFORE: 0.002, Fault.ERROR_AFTER: 0.002}
"""Of what a start asks before it has units: an error there ends it, and it is started again."""

_CONFIG = b"""{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": %d,
 "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 3, "vocab_size": %d,
 "max_position_embeddings": 4096, "rms_norm_eps": 1e-6}"""


@dataclass(frozen=True)
class Tree:
    """One extraction's places, from its first start to its manifest."""

    folder: Path
    kind: Kind
    seed: str
    units: int
    url: str = ""
    """Of the store, where it is an S3 server's."""

    options: Mapping[str, str] | None = None
    sabotage: Sabotage = ""

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder / "run")

    @property
    def journal(self) -> Path:
        return self.run.features / "journal.jsonl"

    @property
    def staging(self) -> Path:
        return self.folder / "staging"

    @property
    def board(self) -> Path:
        return self.folder / "board"

    @property
    def orders(self) -> Path:
        return self.folder / "orders"

    @property
    def begun(self) -> Path:
        return self.folder / "begun"

    @property
    def expected(self) -> Path:
        """What each unit's object has to be."""
        return self.folder / "expected.json"

    @property
    def passed(self) -> Path:
        """Gets the points that a start passed which came to its end."""
        return self.folder / "passed"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def recipe(self) -> Recipe:
        return Recipe(
            target=TargetRecipe(path=str(self.folder / "target"), workers=WORKERS, threads=1),
            corpus=CorpusRecipe(sources=(SourceRecipe(path=str(self.folder / "rows.jsonl")),)),
            regenerate=RegenerateRecipe(enabled=False),
            extract=ExtractRecipe(
                taps=LAYERS,
                # Every sample is a unit of its own.
                shard_bytes=1,
                codec="none",
                store=self.url,
                store_options=dict(self.options or {}),
                staging=str(self.staging),
                staging_bytes=_STAGING_BYTES,
                high_mark=0.999,
                low_mark=0.99,
                space_wait=60.0,
                uploads=UPLOADS,
                # A unit that is killed often is no poison here.
                unit_retries=1000,
                recheck_samples=0,
            ),
        )

    def fingerprint(self) -> str:
        return stage.open_setting(self.recipe(), self.run)[1].fingerprint

    def unit(self, index: int, fingerprint: str) -> Unit:
        return Unit(self.seed, index, fingerprint)

    def make(self) -> dict[str, Stat]:
        """Write target and corpus; what each unit's object has to be."""
        for folder in (self.folder / "target", self.run.corpus, self.orders, self.staging):
            folder.mkdir(parents=True)
        (self.folder / "target" / "config.json").write_bytes(_CONFIG % (HIDDEN, VOCAB))
        write_tensors(self.folder / "target" / "model.safetensors", {"w": ("U8", [1], b"w")}, {})
        lines = [encode_sample(_sample(self.unit(n, ""))) for n in range(self.units)]
        self.run.prepared.write_bytes(b"".join(lines))
        Board(self.board)
        self.begun.touch()
        fingerprint = self.fingerprint()
        expected = {
            unit_key(n): promised_stat(self.unit(n, fingerprint), self.folder)
            for n in range(self.units)
        }
        self.expected.write_bytes(msgspec.json.encode(expected))
        return expected

    def truth(self) -> Store:
        """What stands behind the store, without its faults."""
        if self.kind == "local":
            return LocalStore(self.run.features)
        if self.kind == "faulty":
            return LocalStore(self.folder / "store")
        return open_store(f"{self.url}/{self.fingerprint()}", self.options)


def start(tree: Tree, life: int, orders: tuple[Order, ...]) -> None:
    """Run the stage as the command does, in this process, with its orders. Raises what it raises.

    For a process of its own: it replaces parts of the product for good.
    """
    logging.disable(logging.CRITICAL)
    board = Board(tree.board)
    board.write(SUPERVISOR, "starting")
    own = tuple(order for order in orders if order.who in ("supervisor", "uploader", "group"))
    watch = MarkedWatch(board, SUPERVISOR, Orders(tree.orders, board, SUPERVISOR, own))
    _put_marks(tree, life, orders, watch)
    board.write(SUPERVISOR, "between calls")
    with owned(tree.run.root, "torture"):
        stage.run(tree.recipe(), tree.run)
    tree.passed.write_text("\n".join(sorted(watch.seen)))
    board.write(SUPERVISOR, "done")


def _put_marks(tree: Tree, life: int, orders: tuple[Order, ...], watch: MarkedWatch) -> None:
    fingerprint = tree.fingerprint()
    plan = Plan(tree.board, tree.orders, orders, tree.begun)
    _replace(stage, "IoWatch", lambda: watch)
    _replace(stage, "destination", partial(_destination, tree, life, watch, stage.destination))
    _replace(stage, "adopt_recipe", _marked(watch, "recipe: adopt", stage.adopt_recipe))
    _replace(setting, "open_rows", _marked(watch, "rows: index", setting.open_rows))
    for module in (work, software):
        # It reads every source file: a good part of a short life.
        _replace(module, "source_hash", lambda: "")
    _replace(work, "supervise", partial(_supervise, tree, plan, fingerprint))
    _replace(work, "survey", _marked(watch, "survey: read", ledger.survey))
    for name in ("begin", "finish"):
        method = getattr(stage.StageRecord, name)
        _replace(stage.StageRecord, name, _marked(watch, f"stage record: {name}", method))
    _replace(destinations, "Uploader", partial(Uploader, first_pause=_PAUSE))
    if tree.sabotage == "forgetful":
        survey = work.survey
        _replace(
            work,
            "survey",
            lambda *args, **rest: replace(survey(*args, **rest), done={}, adopted={}),
        )
    if tree.sabotage == "hasty":
        told = msgspec.json.decode(tree.expected.read_bytes(), type=dict[str, Stat])
        _replace(destinations, "LocalDepot", partial(HastyLocalDepot, told))
        _replace(destinations, "StagedDepot", HastyStagedDepot)


def _replace(where: Any, name: str, value: Any) -> None:
    mock.patch.object(where, name, value).start()


def _marked(watch: MarkedWatch, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with watch.call(what):
            return function(*args, **kwargs)

    return call


def _destination(
    tree: Tree,
    life: int,
    watch: MarkedWatch,
    real: Callable[..., Destination],
    recipe: ExtractRecipe,
    run_dir: RunDir,
    fingerprint: str,
) -> Destination:
    if tree.kind == "local":
        return real(recipe, run_dir, fingerprint)
    if tree.kind == "s3":
        store = real(recipe, run_dir, fingerprint).store
    else:
        seed = crc64(f"{tree.seed} {life}".encode())
        # A server forgets a put that was cut off; this folder of ours needs to be told.
        remove_dead_partials(tree.folder / "store")
        store = FaultyStore(tree.truth(), seed=seed, faults=_faults(seed), stall_seconds=0.02)
    return Destination(MarkedStore(store, watch), is_own=False)


def _faults(seed: int) -> Callable[[str, str, int], Fault | None]:
    loud, quiet = by_chance(seed, _FAULTS), by_chance(seed, _QUIET_FAULTS)

    def plan(operation: str, key: str, number: int) -> Fault | None:
        return (loud if operation in ("put", "head") else quiet)(operation, key, number)

    return plan


def _supervise(
    tree: Tree,
    plan: Plan,
    fingerprint: str,
    _setup: object,
    _job: object,
    tasks: list[Task],
    depot: Any,
    *,
    policy: Any,
    on_event: Callable[[str, dict[str, Any]], None],
    **rest: Any,
) -> Outcome:
    """The real one, with the producer for a target, and workers that are killed as they start."""
    newborn = [o for o in plan.orders if o.who == "starting worker"]

    def told(kind: str, fields: dict[str, Any]) -> None:
        if kind == "worker" and fields["what"] in ("started", "restarted") and newborn:
            order = newborn.pop()
            threading.Thread(
                target=_kill_newborn, args=(tree, order, fields["pid"]), daemon=True
            ).start()
        on_event(kind, fields)

    return supervise(
        open_producer,
        plan,
        [replace(task, payload=tree.unit(task.index, fingerprint)) for task in tasks],
        depot,
        # It is killed on purpose: neither patience nor pauses are what is tried here.
        policy=replace(policy, restarts=10_000, backoff=0.002),
        on_event=told,
        **rest,
    )


def _kill_newborn(tree: Tree, order: Order, pid: int) -> None:
    time.sleep(order.delay)
    # It may have been killed by an order of its own; its parent, this process, keeps its number.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        (tree.orders / order.name).write_bytes(b"worker\nstarting")


class MarkedStore:
    """A store whose calls are known to a watch."""

    def __init__(self, inner: Store, watch: MarkedWatch) -> None:
        self._inner, self._watch = inner, watch

    @property
    def url(self) -> str:
        return self._inner.url

    def put(self, key, source, crc64=None):
        with self._watch.call("upload: put"):
            return self._inner.put(key, source, crc64)

    def head(self, key):
        with self._watch.call("upload: head"):
            return self._inner.head(key)

    def get_range(self, key, start, end):
        return self._inner.get_range(key, start, end)

    def list(self, prefix, after=""):
        return self._inner.list(prefix, after)

    def delete(self, keys):
        self._inner.delete(keys)


class HastyLocalDepot(LocalDepot):
    """Records a unit as verified before its file has its name."""

    def __init__(self, expected: Mapping[str, Stat], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._expected = dict(expected)

    def admit(self, key, num_bytes):
        why = super().admit(key, num_bytes)
        if why is None and key in self._expected:
            self._records.add("verified", key, self._expected.pop(key), lambda: None)
        return why

    def made(self, key, stat):
        self._admitted.pop(key)
        self._unrecorded[key] = stat
        self._recorded(key)


class HastyStagedDepot(StagedDepot):
    """Records a unit as verified when it is handed to the uploader."""

    def _submit(self, key, path, stat, *, may_be_there=False):
        self._records.add("verified", key, stat, lambda: None)
        super()._submit(key, path, stat, may_be_there=may_be_there)

    def _uploaded(self, end):
        self._verified(end)


def _sample(unit: Unit) -> Sample:
    ids = unit.input_ids
    return Sample(
        sample_id=unit.sample_id,
        prompt_id=unit.sample_id,
        source="made",
        split=Split.TRAIN,
        messages=[],
        input_ids=ids,
        loss_spans=[(unit.loss_start, len(ids))],
    )
