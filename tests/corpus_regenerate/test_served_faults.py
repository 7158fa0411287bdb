"""What goes wrong with a row, with an endpoint, and with all of them, is told apart."""

import json
import re
import threading
import time
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest

from paceline.cli.main import main
from paceline.corpus.regenerate import quarantine_path, run
from paceline.durable.errors import ServersFailed, UserError
from paceline.recipe.schema import CorpusRecipe, DrafterRecipe, ExtractRecipe, SourceRecipe
from paceline.recipe.write import template
from paceline.target.served.endpoint import Endpoint
from paceline.target.served.pace import Pace
from paceline.target.served.replies import Failed, Rejected, Reply, Unusable, models_of, outcome_of
from regenerate_world import make_recipe

NOWHERE = "http://127.0.0.1:9"


def served_recipe(target, *urls, **options):
    return make_recipe(
        target,
        sampled=False,
        servers=tuple(urls),
        **{"timeout": 3.0, "concurrency": 4, "attempts": 3, **options},
    )


def rows(run_dir):
    return [json.loads(line) for line in quarantine_path(run_dir).read_text().splitlines()]


def reasons(report):
    found = dict(report.numbers["reasons"])
    found.pop("too_few_loss_tokens", None)
    return found


def stats(report):
    return {one["url"]: one for one in report.numbers["served"]["endpoints"]}


def test_a_dead_endpoint_and_a_slow_one_leave_the_work_to_the_third(prepared, serve, toy):
    slow, quick = serve(pause=0.4), serve()
    run_dir = prepared()
    report = run(served_recipe(toy, NOWHERE, slow.url, quick.url, concurrency=2), run_dir)
    told = stats(report)
    assert told[NOWHERE]["asked"] == 0
    assert told[slow.url]["answered"] + told[quick.url]["answered"] == 21
    assert told[quick.url]["answered"] > 2 * told[slow.url]["answered"]
    assert reasons(report) == {}
    assert max((slow.asked() + quick.asked()).values()) == 1


def test_an_endpoint_that_comes_late_takes_part(prepared, serve, toy):
    first, late = serve(pause=0.3), serve()
    late.kill()
    threading.Timer(0.5, late.start).start()
    report = run(served_recipe(toy, first.url, late.url, concurrency=1), prepared())
    assert stats(report)[late.url]["answered"] > 5


def test_a_poison_prompt_is_given_up_told_and_asked_again_on_demand(prepared, serve, toy):
    """It fails to the end of the run, where no other prompt shows that the server is there."""
    server = serve(poison=frozenset({3, 12}))
    run_dir = prepared()
    recipe = served_recipe(toy, server.url, attempts=2)
    report = run(recipe, run_dir)
    assert reasons(report) == {"server_failed": 2}
    assert server.asked()[3] == server.asked()[12] == 2
    [sentence] = report.undone
    assert "2 prompts" in sentence
    assert f"paceline regenerate --run {run_dir.root} --ask-again server_failed" in sentence
    details = [row["detail"] for row in rows(run_dir) if row["reason"] == "server_failed"]
    assert all("EngineCore encountered an issue" in detail for detail in details)
    again = run(recipe, run_dir)
    assert again.skipped
    assert again.undone == report.undone
    server.kill()
    server.start(poison=frozenset({3}))
    before = server.asked()
    third = run(recipe, run_dir, ask_again=["server_failed"])
    assert reasons(third) == {"server_failed": 1}
    assert third.numbers["reused_answers"] == 19
    assert set(server.asked() - before) == {3, 12}
    assert len(rows(run_dir)) == third.numbers["quarantined"]


def test_the_command_says_what_is_not_done_by_its_exit_code(tmp_path, serve, toy, capsys):
    server = serve(poison=frozenset({3}))
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{number} row"} for number in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = served_recipe(toy, server.url, attempts=1)
    recipe = replace(
        recipe,
        corpus=CorpusRecipe(
            max_length=96, sources=(SourceRecipe(path=str(data)),), validation_fraction=0.2
        ),
        extract=ExtractRecipe(taps=(0,), batch_tokens=96),
        drafter=DrafterRecipe(layers=1, block_size=4),
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(template(recipe))
    asked = [str(path), "--run", str(tmp_path / "run")]
    assert main(["prepare", *asked]) == 0
    assert main(["regenerate", *asked]) == 1
    out = capsys.readouterr().out
    assert "not done: regenerate: 1 prompt over which the servers failed each time" in out
    assert "1 server_failed" in out
    assert main(["regenerate", *asked, "--set", f"regenerate.servers=[{NOWHERE}]"]) == 1
    assert "already done" in capsys.readouterr().out
    assert main(["regenerate", *asked, "--set", "regenerate.seed=7"]) == 2
    assert "regenerate.seed: 0 -> 7" in capsys.readouterr().err
    assert main(["regenerate", *asked, "--ask-again", "loop,"]) == 2
    assert "--ask-again: empty" in capsys.readouterr().err
    server.kill()
    server.start(poison=frozenset())
    assert main(["regenerate", *asked, "--ask-again", "server_failed,loop"]) == 0
    assert "server_failed" not in capsys.readouterr().out


def test_rows_that_a_server_refuses_are_quarantined_and_never_asked_again(prepared, serve, toy):
    server = serve(rejected=frozenset({0, 1, 2, 16}))
    run_dir = prepared()
    report = run(served_recipe(toy, server.url, concurrency=1), run_dir)
    assert reasons(report) == {"server_rejected": 4}
    assert report.undone == ()
    assert max(server.asked().values()) == 1
    details = {row["detail"] for row in rows(run_dir) if row["reason"] == "server_rejected"}
    assert "status 400: prompt 16 is not to this server's taste" in details
    assert stats(report)[server.url]["rejected"] == 4


def test_a_server_that_refuses_every_row_is_what_is_wrong(prepared, serve, toy):
    server = serve(rejected=frozenset(range(26)))
    run_dir = prepared()
    with pytest.raises(UserError, match=r"answered none and rejected the first 8 prompts: status"):
        run(served_recipe(toy, server.url), run_dir)
    server.kill()
    server.start(rejected=frozenset(), model="renamed", lists=("renamed",))
    # Nothing was kept that the mended recipe's answers could be mixed with.
    mended = served_recipe(toy, server.url, server_options={"top_k": 1})
    report = run(mended, run_dir)
    assert reasons(report) == {}
    assert report.numbers["reused_answers"] == 0
    assert report.numbers["served"]["model"] == "renamed"


def test_keys_models_and_routes_that_are_wrong_end_it_with_all_the_reasons(prepared, serve, toy):
    locked, other, several = (
        serve(key="sesame"),
        serve(lists=("elephant",)),
        serve(lists=("toy", "elephant")),
    )
    run_dir = prepared()
    rootless = other.url.removesuffix("/v1")
    recipe = served_recipe(toy, locked.url, other.url, rootless, several.url, model="mouse")
    with pytest.raises(UserError) as caught:
        run(recipe, run_dir)
    said = str(caught.value)
    assert f"{locked.url}: status 401: Unauthorized" in said
    assert f"{other.url}: serves elephant, not mouse (regenerate.model)" in said
    assert f"{several.url}: serves toy, elephant, not mouse" in said
    assert f"{rootless}: status 404" in said
    assert "under `/v1`" in said
    with pytest.raises(UserError, match=r"lists toy, elephant: name one in regenerate\.model"):
        run(served_recipe(toy, several.url), run_dir)


def test_one_endpoint_without_its_key_leaves_the_work_to_the_other(
    prepared, serve, toy, monkeypatch
):
    locked, free = serve(key="sesame-open-up"), serve()
    report = run(served_recipe(toy, locked.url, free.url), prepared())
    assert stats(report)[locked.url]["state"] == "out"
    assert any("out: status 401" in line for line in report.lines)
    monkeypatch.setenv("TOY_KEY", "sesame-open-up")
    recipe = served_recipe(toy, locked.url, api_key_variable="TOY_KEY")
    run_dir = prepared("with-key")
    assert reasons(run(recipe, run_dir)) == {}
    told = b"".join(p.read_bytes() for p in run_dir.root.rglob("*") if p.is_file())
    assert b"sesame-open-up" not in told


def test_cut_bodies_and_pages_of_proxies_are_asked_again(prepared, serve, toy):
    server = serve(cuts=0.15, garbage=0.15)
    report = run(served_recipe(toy, server.url, attempts=9), prepared())
    failed = stats(report)[server.url]["failed"]
    assert reasons(report) == {}
    assert failed["cut"] > 0
    assert failed["malformed"] > 0


def test_a_server_that_asks_for_a_pause_gets_it(prepared, serve, toy):
    server = serve(busy_first=3)
    began = time.monotonic()
    report = run(served_recipe(toy, server.url, concurrency=1, attempts=1), prepared(count=10))
    assert time.monotonic() - began > 3.0
    assert reasons(report) == {}
    told = stats(report)[server.url]
    assert told["failed"] == {"status 429": 3}
    assert told["openings"] == 0


def test_no_server_that_answers_ends_it_and_the_answers_are_kept(prepared, serve, toy):
    server = serve(pause=0.1)
    run_dir = prepared()
    recipe = served_recipe(toy, server.url, NOWHERE, server_wait=1.0, concurrency=2)

    def kill_soon():
        while len(server.events("sent")) < 6:
            time.sleep(0.005)
        server.kill()

    killer = threading.Thread(target=kill_soon)
    killer.start()
    with pytest.raises(ServersFailed) as caught:
        run(recipe, run_dir)
    killer.join()
    said = str(caught.value)
    assert caught.value.exit_code == 1
    # What was in flight broke; whether it was asked again in time depends on the machine.
    last = rf"{re.escape(server.url)}: (cannot be reached|the connection broke)"
    assert re.search(last, said)
    assert f"{NOWHERE}: cannot be reached" in said
    assert "regenerate.server_wait" in said
    server.start()
    report = run(recipe, run_dir)
    assert report.numbers["reused_answers"] >= 4
    assert reasons(report) == {}


def test_prompts_that_were_in_flight_when_a_server_died_are_not_blamed(prepared, serve, toy):
    """One failure is all that a prompt may have, and the server dies three times."""
    server = serve(pause=0.1)
    run_dir = prepared()

    def trouble():
        for share in (4, 8, 12):
            while len(server.events("sent")) < share:
                time.sleep(0.005)
            server.kill()
            time.sleep(0.2)
            server.start()

    killer = threading.Thread(target=trouble)
    killer.start()
    report = run(served_recipe(toy, server.url, attempts=1), run_dir)
    killer.join()
    assert reasons(report) == {}


def client(url="http://x"):
    return SimpleNamespace(url=url)


def test_a_breaker_opens_after_failures_in_a_row_and_waits_longer_each_time():
    pace = Pace(opens_after=3, open_first=1.0, open_longest=8.0)
    endpoint = Endpoint(client(), 10, pace, Random(0))
    assert endpoint.needs_check(0.0)
    assert endpoint.room(0.0) == 0
    endpoint.checked("m")
    assert endpoint.room(0.0) == 10
    for _ in range(6):
        endpoint.sent(is_retry=False)
    boom = Failed("status 500", "boom")
    assert [endpoint.failed(boom, 5.0) for _ in range(2)] == [False, False]
    assert endpoint.room(5.0) == 4
    assert endpoint.failed(boom, 5.0)
    assert endpoint.room(5.0) == 0
    assert not endpoint.failed(boom, 5.0), "those in flight do not open it once more"
    pauses = [endpoint.due - 5.0]
    for _ in range(5):
        assert not endpoint.needs_check(endpoint.due - 0.01)
        assert endpoint.needs_check(endpoint.due)
        now = endpoint.due
        endpoint.checked("m")
        assert endpoint.room(now) == 1, "one probe"
        endpoint.sent(is_retry=True)
        assert endpoint.room(now) == 0
        assert endpoint.failed(boom, now)
        pauses.append(endpoint.due - now)
    for pause, whole in zip(pauses, [1, 2, 4, 8, 8, 8], strict=True):
        assert whole / 2 <= pause <= whole
    assert endpoint.stats.openings == 1
    assert endpoint.silent_since == 5.0
    endpoint.checked("m")
    endpoint.sent(is_retry=True)
    assert endpoint.heard(1.0, tokens=5), "it closes"
    assert endpoint.is_usable
    assert endpoint.silent_since is None


def test_successes_between_failures_keep_a_breaker_closed():
    endpoint = Endpoint(client(), 10, Pace(opens_after=3), Random(0))
    endpoint.checked("m")
    for _ in range(20):
        for _ in range(2):
            assert not endpoint.failed(Failed("status 503", "full"), 1.0)
        endpoint.heard(1.0, tokens=1)
    assert endpoint.stats.openings == 0


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, Rejected), (413, Rejected), (422, Rejected), (401, Unusable), (403, Unusable),
        (404, Unusable), (405, Unusable), (302, Unusable), (408, Failed), (425, Failed),
        (429, Failed), (500, Failed), (502, Failed), (503, Failed), (504, Failed),
    ],
)  # fmt: skip
def test_statuses_are_told_apart(status, kind):
    body = b'{"error": {"message": "no\\n such  thing", "code": 7}}'
    told = outcome_of(status, {"Retry-After": "7"}, body)
    assert isinstance(told, kind)
    if status != 302:
        assert told.message == f"status {status}: no such thing"
    if isinstance(told, Failed):
        assert told.retry_after == 7.0
        assert told.is_busy == (status in (429, 503))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"text": "x"}]}', b"\xff{",
        b'{"choices": [{"finish_reason": "stop"}]}',
        b'{"choices": [{"text": "x", "finish_reason": "abort"}]}',
        b'{"choices": [{"text": "x", "finish_reason": "stop", "token_ids": ["a"]}]}',
        b'{"choices": [{"text": "x", "finish_reason": "stop"}] ',
    ],
)  # fmt: skip
def test_what_is_no_completion_is_a_failure(body):
    told = outcome_of(200, {}, body)
    assert isinstance(told, Failed)
    assert told.kind == "malformed"


DEEP = b'{"error":' * 100_000 + b"1" + b"}" * 100_000


@pytest.mark.parametrize("status", [200, 400, 500])
def test_a_body_too_deep_to_decode_is_told_like_any_other(status):
    body = b'{"data": [{"id": "m", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}"
    choice = b'{"text": "x", "finish_reason": "stop", "x": ' + b"[" * 100_000 + b"]" * 100_000
    for told in (
        outcome_of(status, {}, DEEP),
        outcome_of(status, {}, b'{"choices": [' + choice + b"}]}"),
        models_of(status, {}, body),
    ):
        assert not isinstance(told, Reply | tuple)
        assert len(told.message) < 400


def test_a_key_is_trimmed_and_one_that_no_header_can_hold_is_refused(
    prepared, serve, toy, monkeypatch
):
    server = serve(key="abc")
    recipe, run_dir = served_recipe(toy, server.url, api_key_variable="TOY_KEY"), prepared()
    monkeypatch.setenv("TOY_KEY", "ab\nc")
    with pytest.raises(UserError, match="TOY_KEY of the environment holds control characters"):
        run(recipe, run_dir)
    monkeypatch.setenv("TOY_KEY", " abc\n")
    assert stats(run(recipe, run_dir))[server.url]["answered"] == 21


def test_both_kinds_of_replies_are_read():
    told = outcome_of(
        200,
        {},
        b'{"id": 1, "usage": {"prompt_tokens": 3}, "choices": [{"text": "x", "token_ids": [4, 5],'
        b'"finish_reason": "stop", "prompt_token_ids": [1, 2, 3], "logprobs": null}]}',
    )
    assert told == Reply("x", "stop", [4, 5], [1, 2, 3], 3)
    told = outcome_of(
        200,
        {},
        b'{"prompt_token_ids": [1], "choices": [{"message": {"content": "x", "reasoning": "y"},'
        b'"finish_reason": "length"}]}',
    )
    assert told == Reply("x", "length", None, [1], None, is_all=False)
    assert models_of(200, {}, b'{"object": "list", "data": [{"id": "a"}, {"id": "b"}]}') == (
        "a",
        "b",
    )
    date = "Wed, 21 Oct 2015 07:28:00 GMT"
    assert outcome_of(503, {"Retry-After": date}, b"").retry_after == 0.0
    assert outcome_of(503, {"Retry-After": "soon"}, b"").retry_after is None
