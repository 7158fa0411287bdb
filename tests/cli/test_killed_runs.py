"""`paceline run` killed, in every stage and at random: started again, it ends like another."""

import random

import psutil

from paceline.durable.processes import wait_while
from paceline.recipe.run_dir import RunDir
from random_kills import random_kills
from run_server import differences, wait_for_event

MOMENTS = (
    ("prepare", "start"),
    ("regenerate", "progress"),
    ("extract", "progress"),
    ("train", "checkpoint"),
    ("score", "progress"),
)


def test_a_run_killed_in_every_stage_ends_like_an_undisturbed_one(
    straight, tmp_path, server, recipe
):
    run = RunDir(tmp_path / "run")
    command = ("run", str(recipe), "--run", str(run.root))
    for stage, kind in MOMENTS:
        pid = server.start(*command)
        wait_for_event(run, stage, kind, pid)
        assert server.kill(pid)
    assert server.run(*command) == 0, server.log.read_text()
    assert differences(run, straight.run) == []
    assert (run.features / "manifest.json").is_file()
    assert (run.score / "result.json").is_file()


def test_runs_killed_at_random_end_like_an_undisturbed_one(straight, tmp_path, server, recipe):
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    outcome = random_kills(
        server, recipe, straight, tmp_path, count=6, twice=2, rng=random.Random(seed)
    )
    assert outcome.differences == []
    assert outcome.kills.total() == 6


def test_a_run_of_two_workers_killed_leaves_none_of_them_and_goes_on(
    straight, tmp_path, server, recipe
):
    run = RunDir(tmp_path / "run")
    recipe_and_run = (str(recipe), "--run", str(run.root))
    for stage in ("prepare", "regenerate"):
        assert server.run(stage, *recipe_and_run) == 0
    workers = ("--set", "target.workers=2", "--set", "extract.isolate=true")
    pid = server.start("run", *recipe_and_run, *workers)
    wait_for_event(run, "extract", "progress", pid)
    workers = psutil.Process(pid).children(recursive=True)
    assert len(workers) >= 2
    assert server.kill(pid)
    assert not wait_while(workers, 5)
    assert server.run("run", *recipe_and_run) == 0, server.log.read_text()
    assert differences(run, straight.run) == []
