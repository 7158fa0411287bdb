from collections import Counter

import pytest

from fixtures_chatml import turns
from fixtures_corpus import recipe_of
from lint_data import linted, source, tokens_row
from paceline.corpus.lint import languages
from paceline.corpus.lint.lint import lint

TEXTS = {
    "en": "Please write a short letter to my grandmother, who lives by the sea",
    "de": "Bitte schreibe meiner Großmutter einen kurzen Brief, sie wohnt am Meer",
    "fr": "Écris une courte lettre à ma grand-mère, qui habite au bord de la mer",
    "es": "Escribe una carta corta a mi abuela, que vive cerca del mar con su gato",
    "ru": "Напиши, пожалуйста, короткое письмо моей бабушке, которая живёт у моря",
    "zh": "请给我住在海边的祖母写一封短信，告诉她我很想念她，希望她身体健康，万事如意",
    "ja": "海のそばに住んでいる祖母に短い手紙を書いてください。とても会いたいと伝えてください。",
}


def rows(text, count=1):
    return [{"messages": turns(f"u:{text}|a:I answer number {i}.")} for i in range(count)]


def test_each_language_of_a_file_is_found(tmp_path):
    many = [row for n, text in enumerate(TEXTS.values()) for row in rows(text, n + 1)]
    counts = linted(tmp_path, many).languages["data"]
    assert counts == {code: n + 1 for n, code in enumerate(TEXTS)}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Why?", "short, latin"),
        ("Почему?", "short, cyrillic"),
        ("为什么", "short, cjk"),
        ("2 + 2 = 4", "no letters"),
    ],
)
def test_short_texts_are_told_by_their_script(tmp_path, text, found):
    assert linted(tmp_path, rows(text)).languages == {"data": Counter({found: 1})}


def test_rows_without_turns_are_read_too(tmp_path):
    text = TEXTS["en"]
    some = [{"text": text}, tokens_row(text, [0] * 9 + [1] * (len(text) - 9))]
    assert linted(tmp_path, some).languages == {"data": Counter({"en": 2})}


def test_of_each_source_a_few_are_looked_at_whatever_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(languages, "MOST", 5)
    mixed = [row for text in TEXTS.values() for row in rows(text, 4)]
    one = source(tmp_path, "one", mixed)
    other = source(tmp_path, "other", [{**row, "x": 1} for row in rows(TEXTS["de"], 9)][4:])
    counts = lint(recipe_of(tmp_path, one, other)).languages
    assert {name: some.total() for name, some in counts.items()} == {"one": 5, "other": 5}
    again = lint(recipe_of(tmp_path, source(tmp_path, "one", mixed[::-1]))).languages["one"]
    assert again == counts["one"]
