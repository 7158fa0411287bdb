import json
import re
from itertools import groupby, pairwise

import pytest

from fixtures_chatml import byte_chatml, merging_chatml, turns
from fixtures_corpus import recipe_of, samples_of
from lint_data import HOSTILE, chats, faulty, linted, source
from paceline.corpus import stage
from paceline.corpus.lint.findings import findings
from paceline.corpus.lint.gallery import ENDS, Gallery
from paceline.corpus.lint.lint import lint
from paceline.corpus.lint.page import MARK, render
from paceline.corpus.lint.shown import pieces, shortened, shown
from paceline.recipe.run_dir import RunDir
from paceline.recipe.schema import SourceRecipe
from paceline.types import Sample, Split
from report_pages import Page

STRICT = frozenset(range(3))


def page_of(result) -> str:
    return render(result, findings(result)).decode()


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    result = linted(folder, faulty(), max_length=400)
    return result, page_of(result)


def sample(ids, spans, name="s", **more):
    given = {"sample_id": name, "prompt_id": "p", "source": "data", "split": Split.TRAIN}
    return Sample(**{**given, **more}, messages=[], input_ids=ids, loss_spans=spans)


def test_the_page_is_well_formed_and_says_what_was_found(faults):
    result, text = faults
    assert text.encode().startswith(MARK)
    page = Page(text)
    for finding in findings(result):
        assert finding.title.replace("`", "") in page.words
    for reason in result.reasons:
        assert reason.code in page.words
        for row in reason.examples:
            assert f"{row.source}, row {row.line:,}" in page.words
    assert "not usable as it is" in page.words
    targets = {g["href"][1:] for tag, g in page.tags if tag == "a"}
    assert targets <= page.ids


def test_what_the_data_hold_is_text_and_never_markup(faults):
    _, text = faults
    assert HOSTILE in Page(text).words
    assert "<script>alert" not in text
    assert text.count("<script>") == 1


def test_the_page_loads_nothing(faults):
    _, text = faults
    page = Page(text)
    for tag, given in page.tags:
        assert tag not in ("img", "iframe", "object", "embed")
        for name in ("src", "href", "action"):
            value = given.get(name) or "#"
            assert value.startswith("#") or value == "data:,"
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(g["content"] for t, g in page.tags if g.get("http-equiv"))
    assert policy.startswith("default-src 'none'")


def test_tables_have_headings_and_parts_have_names(faults):
    _, text = faults
    page = Page(text)
    assert all(given.get("scope") in ("col", "row") for tag, given in page.tags if tag == "th")
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    for _, given in page.tags:
        if given.get("tabindex") == "0" and given.get("role") == "region":
            assert given["aria-label"]


def test_without_its_script_everything_is_shown(faults):
    _, text = faults
    page = Page(text)
    hidden = [given for _, given in page.tags if "hidden" in given]
    assert [given.get("id") for given in hidden] == ["filters"]
    buttons = {g["data-show"] for tag, g in page.tags if tag == "button"} - {""}
    tags = {t for _, g in page.tags if "data-tags" in g for t in (g["data-tags"] or "").split()}
    assert tags == buttons


def test_filters_and_counts_of_articles(faults):
    result, text = faults
    articles = [g for tag, g in Page(text).tags if tag == "article"]
    assert len(articles) == len(result.samples) + sum(len(r.examples) for r in result.reasons)


@pytest.mark.parametrize("tokenizer", [byte_chatml(), merging_chatml()])
def test_the_colours_are_the_spans(tmp_path, tokenizer):
    rows = [
        {"messages": turns("s:be brief|u:hi\nthere|a:one\n\ntwo|u:more|a:  three\n")},
        *chats(4),
    ]
    recipe = recipe_of(tmp_path, source(tmp_path, "data", rows), tokenizer=tokenizer)
    run_dir = RunDir(tmp_path / "run")
    stage.run(recipe, run_dir)
    by_id = {s.sample_id: s for s in samples_of(run_dir)}
    result = lint(recipe)
    assert {s.sample_id for s in result.samples} == by_id.keys()
    page = page_of(result)
    for item in result.samples:
        mine = by_id[item.sample_id]
        decode = tokenizer.decode
        expected = [decode(mine.input_ids[a:b]).replace("\n", "↵\n") for a, b in mine.loss_spans]
        groups = groupby(item.pieces, key=lambda piece: piece.kind)
        runs = ["".join(p.text for p in group) for kind, group in groups if kind == "trained"]
        assert runs == expected
        plain = "".join(p.text.replace("↵\n", "\n") for p in item.pieces)
        assert plain == decode(mine.input_ids)
        assert all(p.is_special == p.text.startswith("<|im_") for p in item.pieces)
        start = page.index(f'aria-label="Text of {item.sample_id}"')
        shown_text = page[start : page.index("</div>", start)]
        marked = re.sub(r"</mark><mark>", "", shown_text)
        found = re.findall(r"<mark>(.*?)</mark>", marked, flags=re.DOTALL)
        assert [re.sub(r"<[^>]+>", "", m).replace("&lt;", "<").replace("&gt;", ">")
                for m in found] == expected  # fmt: skip


def test_long_runs_are_cut_in_their_middle_and_the_ends_of_masks_stay():
    tokenizer = byte_chatml()
    ids = tokenizer.encode("c" * 500 + "t" * 500 + "d" * 30)
    cut = list(pieces(sample(ids, [(500, 1000)]), tokenizer, STRICT, 150))
    assert [p.kind for p in cut] == ["context", "cut", "context", "trained", "cut", "trained",
                                     "context"]  # fmt: skip
    assert "450 untrained tokens" in cut[1].text
    assert "450 trained tokens" in cut[4].text
    assert [len(p.text) for p in cut if p.kind != "cut"] == [34, 16, 34, 16, 30]
    many = sample(tokenizer.encode("ab" * 300), [(i, i + 1) for i in range(0, 600, 2)])
    runs = list(pieces(many, tokenizer, STRICT, 150))
    assert [p.kind for p in runs].count("cut") == 1
    assert len(runs) == 41
    assert "560 tokens of 560 runs" in next(p.text for p in runs if p.kind == "cut")


def test_shortened_texts_say_so():
    assert shortened("short", 10) == "short"
    text = shortened("a" * 50 + "b" * 50, 30)
    assert text == f"{'a' * 20} … 70 characters are not shown … {'b' * 10}"


def test_the_ends_of_every_scale_and_each_source_are_shown():
    gallery = Gallery()
    for n in range(400):
        length = 10 + n % 97
        trained = 1 + n % 7
        made = sample(list(range(length)), [(length - trained, length)], f"{n * 7919 % 400:04}",
                      source=f"s{n % 9}")  # fmt: skip
        gallery.add(made)
    chosen = gallery.chosen()
    assert len(chosen) <= 40
    assert {c.sample.source for c in chosen} == {f"s{n}" for n in range(9)}
    labelled = {label: [c.sample for c in chosen if label in c.labels] for label in ENDS}
    assert {len(s.input_ids) for s in labelled["longest"]} == {106}
    assert {len(s.input_ids) for s in labelled["shortest"]} == {10}
    shares = [s.num_loss_tokens / len(s.input_ids) for s in labelled["most trained"]]
    assert max(shares) == 0.7
    ids = [c.sample.sample_id for c in chosen]
    assert len(ids) == len(set(ids))


def test_many_sources_and_long_samples_make_no_huge_page():
    tokenizer, gallery = byte_chatml(), Gallery()
    ids = tokenizer.encode("<" * 4000)
    for n in range(1000):
        gallery.add(sample(ids, [(2000, 4000)], f"{n:04}", source=f"s{n}"))
    items = shown(gallery.chosen(), tokenizer)
    assert len(items) <= 240
    # Four bytes for each `<`, which is the worst that escaping does to a character, but for quotes.
    assert sum(len(p.text) for item in items for p in item.pieces) * 5 < 2_000_000


def test_a_page_of_prompts_promises_no_mask(tmp_path):
    result = linted(tmp_path, [{"prompt": f"Say {i}"} for i in range(4)], regenerate=True)
    text = page_of(result)
    assert "<mark>" not in text
    assert "the target writes them" in Page(text).words


def test_a_page_of_nothing_stands(tmp_path):
    for rows in ([], [b"bad"]):
        Page(page_of(linted(tmp_path, rows)))


def test_half_characters_and_names_with_quotes_do_no_harm(tmp_path):
    path = source(tmp_path, 'a"b<i>', [{"prompt": "x"}, b'{"bad": "\\ud800'])
    path.write_bytes(path.read_bytes() + json.dumps({"messages": turns("u:x|a:yes")}).encode())
    Page(page_of(lint(recipe_of(tmp_path, path))))


def test_evaluation_prompts_are_no_samples_of_the_training(tmp_path):
    held = SourceRecipe(path=str(source(tmp_path, "held", chats(3, 90))), split="heldout")
    page = Page(page_of(lint(recipe_of(tmp_path, source(tmp_path, "data", chats(4)), held))))
    assert re.search(r"samples\s*4\s*from 4 rows", page.words)
    assert re.search(r"rows read\s*7\s*2 sources", page.words)
