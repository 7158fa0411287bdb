"""Regeneration through servers: every prompt is answered once, whatever happens on the way."""

import json
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

from paceline.corpus.regenerate import quarantine_path, run
from paceline.corpus.served.stage import question_of, request_seed
from paceline.durable.errors import Interrupted, JournalDamaged, RecipeChanged
from paceline.recipe.fingerprint import flatten
from paceline.recipe.schema import RegenerateRecipe
from paceline.recipe.served_inputs import answering_fields
from paceline.recipe.stage import read_record
from paceline.status import run_status
from paceline.types import Split
from paceline.types.sample import read_samples
from regenerate_world import make_readable_target, make_recipe, run_with_one_thread


def served_recipe(target, *servers, **options):
    """Greedy; in 0.3 s or not at all."""
    return make_recipe(
        target,
        sampled=False,
        servers=tuple(server.url for server in servers),
        **{"timeout": 3.0, "concurrency": 4, **options},
    )


def rows(run_dir):
    return [json.loads(line) for line in quarantine_path(run_dir).read_text().splitlines()]


def journal(run_dir):
    return run_dir.corpus / "answers.journal"


def answered_once(run_dir):
    """Every prompt of the corpus, held-out ones left out, has one line of its own."""
    lines = [line[9:] for line in journal(run_dir).read_bytes().splitlines()]
    told = Counter(r["prompt_id"] for r in map(json.loads, lines) if r["kind"] == "answer")
    samples = [s for s in read_samples(run_dir.prepared) if s.split is not Split.HELDOUT]
    assert told == Counter(sample.prompt_id for sample in samples)
    got = Counter(s.prompt_id for s in read_samples(run_dir.regenerated))
    left_out = Counter(row["prompt_id"] for row in rows(run_dir))
    assert got + left_out == Counter(s.prompt_id for s in read_samples(run_dir.prepared))


def in_process(prepared, target, **options):
    """The corpus that the target makes in this process."""
    run_dir = prepared("in-process", target, **options)
    run(make_recipe(target, sampled=False), run_dir)
    return run_dir


def test_every_row_is_answered_once_by_a_server_that_fails_hangs_and_dies(prepared, serve, toy):
    """503 one time in five, no answer one time in fifty, killed twice: the issue's number."""
    server = serve(unavailable=0.2, hangs=0.02, pause=0.02, seed=14)
    run_dir = prepared(count=80)
    recipe = served_recipe(toy, server)

    def trouble():
        for share in (15, 40):
            while len(server.events("sent")) < share:
                time.sleep(0.005)
            server.kill()
            time.sleep(0.3)
            server.start()

    killer = threading.Thread(target=trouble)
    killer.start()
    report = run(recipe, run_dir)
    killer.join()
    answered_once(run_dir)
    assert report.undone == ()
    assert report.numbers["quarantined"] == report.numbers["reasons"].get("too_few_loss_tokens", 0)
    [stats] = report.numbers["served"]["endpoints"]
    assert stats["asked"] == stats["answered"] + sum(stats["failed"].values())
    assert stats["answered"] == 64
    assert stats["failed"]["status 503"] > 5
    assert stats["openings"] >= 2
    assert len(server.events("unavailable")) > 5
    assert server.events("hang")
    wanted = in_process(prepared, toy, count=80)
    assert run_dir.regenerated.read_bytes() == wanted.regenerated.read_bytes()
    assert quarantine_path(run_dir).read_bytes() == quarantine_path(wanted).read_bytes()


def test_t_31_a_killed_client_asks_for_what_is_missing(prepared, serve, toy, nursery):
    server = serve(slow={0: 5.0}, pause=0.1)
    run_dir = prepared(count=10)
    recipe = served_recipe(toy, server, timeout=20.0)
    client = nursery.start(run_with_one_thread, recipe, run_dir.root)
    end = time.monotonic() + 60
    while not journal(run_dir).is_file() or journal(run_dir).read_bytes().count(b'"answer"') < 3:
        assert time.monotonic() < end
        time.sleep(0.002)
    assert nursery.kill(client) == -9
    kept = journal(run_dir).read_bytes().count(b'"answer"')
    assert 3 <= kept < 8
    before = server.asked()
    server.kill()
    server.start(slow={})
    report = run(recipe, run_dir)
    answered_once(run_dir)
    assert report.numbers["reused_answers"] == kept
    assert sum((server.asked() - before).values()) == 8 - kept
    assert report.numbers["served"]["endpoints"][0]["asked"] == 8 - kept


def test_a_torn_line_is_cut_and_its_prompt_asked_again(prepared, serve, toy):
    server = serve()
    run_dir = prepared(count=10)
    recipe = served_recipe(toy, server)
    run(recipe, run_dir)
    whole = run_dir.regenerated.read_bytes()
    journal(run_dir).write_bytes(journal(run_dir).read_bytes()[:-7])
    run_dir.regenerated.unlink()
    before = server.asked()
    report = run(recipe, run_dir)
    assert run_dir.regenerated.read_bytes() == whole
    assert report.numbers["reused_answers"] == 7
    assert sum((server.asked() - before).values()) == 1
    answered_once(run_dir)


def test_damage_in_the_middle_is_refused_with_a_way_out(prepared, serve, toy):
    server = serve()
    run_dir = prepared(count=10)
    run(served_recipe(toy, server), run_dir)
    data = bytearray(journal(run_dir).read_bytes())
    data[len(data) // 2] ^= 1
    journal(run_dir).write_bytes(data)
    run_dir.regenerated.unlink()
    with pytest.raises(JournalDamaged, match=r"remove .*answers\.journal"):
        run(served_recipe(toy, server), run_dir)


@pytest.mark.parametrize("policy", ["keep", "exclude"])
def test_t_33_replies_that_ended_by_length_are_counted(prepared, serve, tmp_path, policy):
    """35 of 100 by what the server says; the others get the end token that it leaves out."""
    target = make_readable_target(tmp_path / "target", ends=False)
    numbers = [n for n in range(125) if n % 5 != 4]
    finishes = {n: "length" if i < 35 else "stop" for i, n in enumerate(numbers)}
    server = serve(target, ends=frozenset({257}), finishes=finishes)
    run_dir = prepared(target=target, count=125)
    report = run(served_recipe(target, server, on_length=policy, max_new_tokens=9), run_dir)
    assert report.numbers["finish"] == {"stop": 65, "length": 35}
    assert RegenerateRecipe().on_length == "exclude"
    answers = [s for s in read_samples(run_dir.regenerated) if s.split is not Split.HELDOUT]
    cut = [sample for sample in answers if sample.finish == "length"]
    assert len(cut) == (35 if policy == "keep" else 0)
    assert report.numbers["reasons"].get("length_cut", 0) == 35 - len(cut)
    assert all(sample.input_ids[-1] != 257 for sample in cut)
    assert all(sample.input_ids[-1] == 257 for sample in answers if sample.finish == "stop")


def test_sampled_answers_depend_on_the_prompt_alone(prepared, serve, toy):
    """Whatever the concurrency and the number of servers."""
    corpora, seeds = [], []
    for name, servers, concurrency in (
        ("one", [serve()], 1),
        ("two", [serve(unavailable=0.3), serve(pause=0.03)], 3),
    ):
        run_dir = prepared(name)
        recipe = served_recipe(toy, *servers, concurrency=concurrency, temperature=2.0, attempts=9)
        run(recipe, run_dir)
        corpora.append(run_dir.regenerated.read_bytes())
        told = [event for server in servers for event in server.events("sent")]
        seeds.append({event["number"]: event["seed"] for event in told})
    assert corpora[0] == corpora[1]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 21


def test_other_parameters_are_refused_and_other_servers_are_not(prepared, serve, toy):
    first, second = serve(), serve()
    run_dir = prepared(count=10)
    run(served_recipe(toy, first), run_dir)
    (run_dir.corpus / "regenerated.jsonl").unlink()
    for change, key in (
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"model": "toy"}, "model"),
        ({"api": "chat"}, "api"),
        ({"server_options": {"top_k": 3}}, r"server_options\.top_k"),
        ({"servers": ()}, "api"),
    ):
        with pytest.raises(RecipeChanged, match=rf"regenerate\.{key}: "):
            run(make_recipe(toy, **{"sampled": False, "servers": (first.url,), **change}), run_dir)
    recipe = served_recipe(toy, first)
    args = replace(recipe, corpus=replace(recipe.corpus, template_args={"enable_thinking": False}))
    with pytest.raises(RecipeChanged, match=r"template_args\.enable_thinking"):
        run(args, run_dir)
    again = served_recipe(toy, second, concurrency=9, timeout=9.0, attempts=2)
    assert run(again, run_dir).numbers["reused_answers"] == 8


def test_a_model_of_another_name_is_refused_in_the_middle_of_a_run(prepared, serve, toy):
    server = serve(poison=frozenset({3}))
    run_dir = prepared(count=10)
    report = run(served_recipe(toy, server, attempts=1), run_dir)
    assert report.undone
    (run_dir.corpus / "regenerate.stage.json").unlink()
    server.kill()
    server.start(model="other", lists=("other",))
    with pytest.raises(RecipeChanged, match=r"serves other.*are by toy"):
        run(served_recipe(toy, server, attempts=1), run_dir)


def test_in_process_records_say_what_they_said_before_there_were_servers(prepared, toy):
    run_dir = in_process(prepared, toy)
    record = read_record(run_dir.corpus, "regenerate")
    keys = {key for key in record.fields if key.startswith("regenerate.")}
    assert keys == {
        f"regenerate.{name}"
        for name in (
            "enabled", "max_new_tokens", "temperature", "top_p", "group_size", "on_length",
            "on_loop", "loop_repeats", "seed",
        )
    }  # fmt: skip
    asked = make_recipe(toy, servers=("http://127.0.0.1:1",), server_options={"top_k": 3})
    fields = answering_fields(asked.regenerate)
    assert fields["regenerate.api"] == "completions"
    assert fields["regenerate.server_options.top_k"] == 3
    patience = ("servers", "concurrency", "timeout", "attempts", "server_wait", "group_size")
    assert not [key for key in fields if key.split(".")[1] in patience]


def test_chat_has_its_prompts_compared(prepared, serve, toy):
    server = serve(stretched=frozenset({1, 7}))
    run_dir = prepared()
    report = run(served_recipe(toy, server, api="chat"), run_dir)
    assert report.numbers["reasons"]["prompt_differs"] == 2
    differ = [row for row in rows(run_dir) if row["reason"] == "prompt_differs"]
    assert {row["finish"] for row in differ} <= {"stop", "length"}
    assert all("they part at token" in row["detail"] for row in differ)
    wanted = {s.prompt_id: s for s in read_samples(in_process(prepared, toy).regenerated)}
    got = list(read_samples(run_dir.regenerated))
    assert len(got) == len(wanted) - 2
    assert all(wanted[sample.prompt_id] == sample for sample in got)
    assert report.numbers["served"]["unchecked_prompts"] == 0


def test_answers_that_come_as_text_are_tokenised_and_said_to_be(prepared, serve, tmp_path):
    target = make_readable_target(tmp_path / "target")
    run_dir = prepared(target=target)
    report = run(served_recipe(target, serve(target, tells_ids=False)), run_dir)
    assert report.numbers["served"]["retokenised"] == 21
    assert report.numbers["finish"]["stop"] > 2
    assert report.numbers["finish"]["length"] > 2
    assert any("21 answers came as text" in line for line in report.lines)
    wanted = in_process(prepared, target)
    assert run_dir.regenerated.read_bytes() == wanted.regenerated.read_bytes()


def test_texts_that_are_no_tokens_are_quarantined(prepared, serve, toy):
    """The toy's bytes are rarely UTF-8, so its texts cannot be what it said."""
    run_dir = prepared()
    short = replace(served_recipe(toy, serve(tells_ids=False)), name="x")
    report = run(replace(short, corpus=replace(short.corpus, min_loss_tokens=1)), run_dir)
    lost = report.numbers["reasons"]["text_not_tokens"]
    assert lost >= 5
    assert lost + report.numbers["served"]["retokenised"] == 21


def test_a_stripped_end_token_is_put_back(prepared, serve, tmp_path):
    target = make_readable_target(tmp_path / "target")
    run_dir = prepared(target=target)
    run(served_recipe(target, serve(target, strips_end=True)), run_dir)
    wanted = in_process(prepared, target)
    assert run_dir.regenerated.read_bytes() == wanted.regenerated.read_bytes()


def test_other_finishes_are_quarantined_by_name(prepared, serve, toy):
    run_dir = prepared()
    finishes = {1: "tool_calls", 2: "content_filter", 3: "content_filter"}
    report = run(served_recipe(toy, serve(finishes=finishes)), run_dir)
    assert report.numbers["reasons"]["finish_tool_calls"] == 1
    assert report.numbers["reasons"]["finish_content_filter"] == 2
    answered_once(run_dir)


def test_a_signal_ends_it_and_the_same_command_goes_on(prepared, serve, toy, monkeypatch):
    server = serve(pause=0.2)
    run_dir = prepared()
    recipe = served_recipe(toy, server, concurrency=2)

    def signal_soon():
        while len(server.events("sent")) < 4:
            time.sleep(0.005)
        __import__("os").kill(__import__("os").getpid(), 15)

    sender = threading.Thread(target=signal_soon)
    sender.start()
    with pytest.raises(Interrupted, match=r"SIGTERM: stopped after \d+ of the 21 prompts"):
        run(recipe, run_dir)
    sender.join()
    kept = journal(run_dir).read_bytes().count(b'"answer"')
    assert kept == len(server.events("sent")), "what was in flight was waited for"
    assert kept <= 8
    assert run_status(run_dir.root).stages[1].state == "interrupted"
    report = run(recipe, run_dir)
    assert report.numbers["reused_answers"] == kept
    assert max(server.asked().values()) == 1
    answered_once(run_dir)


def test_events_and_status_tell_of_each_endpoint(prepared, serve, toy):
    servers = serve(), serve()
    run_dir = prepared()
    report = run(served_recipe(toy, *servers), run_dir)
    lines = (run_dir.events / "regenerate.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [events[0]["kind"], events[-1]["kind"]] == ["start", "finished"]
    progress = [event for event in events if event["kind"] == "progress"]
    assert progress[-1]["done"] == 21
    stats = progress[-1]["endpoints"]
    assert [one["url"] for one in stats] == [server.url for server in servers]
    assert sum(one["answered"] for one in stats) == 21
    assert all(one["tokens"] > 0 and one["mean_seconds"] > 0 for one in stats)
    assert sum(one["tokens"] for one in stats) == report.numbers["tokens"]
    assert sum("21 prompts" in line or "asked" in line for line in report.lines) == 2
    stage = run_status(run_dir.root).stages[1]
    assert stage.counts is not None
    assert (stage.counts.done, stage.counts.total) == (21, 21)


def test_requests_hold_what_the_recipe_says_and_no_more(prepared, toy):
    run_dir = prepared()
    prompt = next(iter(read_samples(run_dir.prepared)))
    recipe = make_recipe(toy, temperature=0.7, top_p=0.9, seed=4, server_options={"top_k": 20})
    asked = question_of(recipe, prompt, 17)
    assert asked.route == "/completions"
    assert asked.fields == {
        "prompt": prompt.input_ids,
        "max_tokens": 17,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": request_seed(4, prompt.prompt_id),
        "return_token_ids": True,
        "top_k": 20,
    }
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    tool = {"type": "function", "function": {"name": "f"}}
    turns = [*prompt.messages, {"role": "assistant", "content": "", "tool_calls": [call]}]
    recipe = replace(
        recipe,
        regenerate=replace(recipe.regenerate, api="chat"),
        corpus=replace(recipe.corpus, template_args={"enable_thinking": False}),
    )
    asked = question_of(recipe, replace(prompt, messages=turns, tools=[tool]), 17)
    assert asked.route == "/chat/completions"
    assert asked.fields["chat_template_kwargs"] == {"enable_thinking": False}
    assert asked.fields["tools"] == [tool]
    sent = asked.fields["messages"][-1]["tool_calls"][0]["function"]
    assert sent == {"name": "f", "arguments": '{"a":1}'}
    assert call["function"]["arguments"] == {"a": 1}
    assert "prompt" not in asked.fields
    assert flatten(asked.fields)["seed"] == request_seed(4, prompt.prompt_id)
