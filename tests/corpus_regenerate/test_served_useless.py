"""Servers that answer without being of use: told early, with a way to have them asked again."""

import json

import pytest

from paceline.corpus.regenerate import quarantine_path, run
from paceline.durable.errors import DataError, UserError
from regenerate_world import make_recipe

ALL = frozenset(range(60))


def served_recipe(target, *servers, **options):
    return make_recipe(
        target,
        sampled=False,
        servers=tuple(server.url for server in servers),
        **{"timeout": 3.0, "concurrency": 4, **options},
    )


def kept(run_dir):
    path = run_dir.corpus / "answers.journal"
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return [r for r in (json.loads(line[9:]) for line in lines) if r["kind"] == "answer"]


@pytest.mark.parametrize(
    ("faults", "options", "reason", "words"),
    [
        ({"mute": ALL}, {}, "too_few_loss_tokens", "an empty text that ended with 'stop'"),
        ({"stretched": ALL}, {"api": "chat"}, "prompt_differs", "they part at token"),
        ({"finishes": dict.fromkeys(ALL, "eos")}, {}, "finish_eos", "the server ended it with"),
    ],
)
def test_a_server_whose_first_answers_are_all_useless_is_what_is_wrong(
    prepared, serve, toy, faults, options, reason, words
):
    server = serve(**faults)
    run_dir = prepared(count=60)
    with pytest.raises(UserError) as told:
        run(served_recipe(toy, server, **options), run_dir)
    assert f"{server.url}: its first 20 answers are of no use, for one reason: {reason}" in str(
        told.value
    )
    assert words in str(told.value)
    assert len(server.asked()) <= 24, "it was stopped early"
    assert kept(run_dir) == []
    server.kill()
    server.start(mute=frozenset(), stretched=frozenset(), finishes={})
    report = run(served_recipe(toy, server, **options), run_dir)
    assert report.numbers["reused_answers"] == 0
    assert not set(report.numbers["reasons"]) - {"too_few_loss_tokens"}


def test_what_a_useless_server_was_asked_goes_to_the_others(prepared, serve, toy):
    bad, good = serve(mute=ALL), serve(pause=0.05)
    run_dir = prepared(count=60)
    report = run(served_recipe(toy, bad, good), run_dir)
    states = {one["url"]: one["state"] for one in report.numbers["served"]["endpoints"]}
    assert states == {bad.url: "out", good.url: "closed"}
    alone = prepared("alone", count=60)
    run(served_recipe(toy, good), alone)
    assert run_dir.regenerated.read_bytes() == alone.regenerated.read_bytes()


def test_useless_answers_are_asked_again_and_the_others_kept(prepared, serve, toy):
    mute = frozenset({0, 1, 8, 15, 22})
    server = serve(mute=mute)
    run_dir = prepared()
    recipe = served_recipe(toy, server)
    first = run(recipe, run_dir)
    assert first.numbers["reasons"]["too_few_loss_tokens"] >= 5
    [warning] = [line for line in first.lines if line.startswith("warning: ")]
    command = f"`paceline regenerate --run {run_dir.root} --ask-again too_few_loss_tokens`"
    assert command in warning
    server.kill()
    server.start(mute=frozenset())
    before = server.asked()
    assert run(recipe, run_dir).skipped, "nothing is asked again by itself"
    with pytest.raises(UserError, match=r"left out for loop\. Left out are: \d too_few_loss"):
        run(recipe, run_dir, ask_again=["loop"])
    report = run(recipe, run_dir, ask_again=["too_few_loss_tokens"])
    dropped = first.numbers["reasons"]["too_few_loss_tokens"]
    assert set(server.asked() - before) >= mute
    assert (server.asked() - before).total() == dropped
    assert report.numbers["reused_answers"] == 21 - dropped
    undisturbed = prepared("undisturbed")
    run(recipe, undisturbed)
    assert run_dir.regenerated.read_bytes() == undisturbed.regenerated.read_bytes()
    assert quarantine_path(run_dir).read_bytes() == quarantine_path(undisturbed).read_bytes()
    again = run(recipe, undisturbed)
    assert again.skipped


def test_a_server_that_is_still_useless_is_told_with_advice_that_fits(prepared, serve, toy):
    """Fewer prompts than show that a server is wrong: they are kept, and can be asked again."""
    server = serve(mute=ALL)
    run_dir = prepared(count=10)
    recipe = served_recipe(toy, server)
    for reasons in ([], ["too_few_loss_tokens"]):
        with pytest.raises(DataError) as told:
            run(recipe, run_dir, ask_again=reasons)
        assert "put a prompt to a server by hand" in str(told.value)
        assert "max_new_tokens" not in str(told.value)
        assert "--ask-again too_few_loss_tokens`" in str(told.value)
    assert max(server.asked().values()) == 2
    server.kill()
    server.start(mute=frozenset(), model="renamed", lists=("renamed",))
    report = run(recipe, run_dir, ask_again=["too_few_loss_tokens"])
    assert report.numbers["served"]["model"] == "renamed"


def test_rows_that_are_refused_once_more_are_no_fault_of_the_server(prepared, serve, toy):
    """More than show a server to be wrong, and nothing else is left to ask."""
    refused = frozenset(range(12, 60))
    server = serve(rejected=refused)
    run_dir = prepared(count=60)
    recipe = served_recipe(toy, server)
    first = run(recipe, run_dir)
    assert first.numbers["reasons"]["server_rejected"] == 38
    [warning] = [line for line in first.lines if line.startswith("warning: 38 of 48 prompts (79%)")]
    assert "the first server_rejected: status 400: prompt 12 is not to this server's" in warning
    second = run(recipe, run_dir, ask_again=["server_rejected", "prompt_differs"])
    assert second.numbers["reasons"] == first.numbers["reasons"]


def test_a_few_refusals_are_no_warning(prepared, serve, toy):
    report = run(served_recipe(toy, serve(rejected=frozenset({3}))), prepared(count=60))
    assert report.numbers["reasons"]["server_rejected"] == 1
    assert not [line for line in report.lines if "server_rejected;" in line]


def test_the_target_itself_says_the_same_again(prepared, toy):
    with pytest.raises(UserError, match="no server is asked here"):
        run(make_recipe(toy), prepared(), ask_again=["loop"])
