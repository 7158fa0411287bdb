"""The word that machines leave in a store which they share."""

import json
import logging

import pytest

from paceline.durable.errors import IntegrityError, StoreFailed, UserError
from paceline.durable.faulty import Fault, FaultyStore
from paceline.durable.store import LocalStore, MemoryStore
from paceline.extract.sharing import KEY, join
from paceline.extract.slices import ALL, Slice

OURS = {"paceline": "1", "source": "a" * 16, "torch": "2", "transformers": "5"}
THEIRS = {**OURS, "torch": "3"}
PART, OTHER_PART = Slice(1, 2), Slice(2, 2)


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    """One that knows how to create an object, and one that does not."""
    return LocalStore(tmp_path / "store") if request.param == "folder" else MemoryStore()


def word(store):
    stat = store.head(KEY)
    return json.loads(store.get_range(KEY, 0, stat.size))


def test_who_comes_first_leaves_word_and_equals_join(store):
    for part in (PART, OTHER_PART, PART):
        join(store, OURS, part, accept_code=False)
    assert word(store) == {**OURS, "parts": "2"}


@pytest.mark.parametrize(("first", "second"), [(PART, OTHER_PART), (PART, ALL), (ALL, PART)])
def test_other_code_is_refused_where_others_may_be_at_work(store, first, second):
    join(store, OURS, first, accept_code=False)
    with pytest.raises(UserError, match=r"other code \(torch 2 there, 3 here\).*--accept-code"):
        join(store, THEIRS, second, accept_code=False)
    assert word(store)["torch"] == "2"
    join(store, THEIRS, second, accept_code=True)
    assert word(store) == {**THEIRS, "parts": str(second.count)}


def test_a_machine_alone_may_be_updated_and_says_so(store, caplog):
    join(store, OURS, ALL, accept_code=False)
    with caplog.at_level(logging.WARNING):
        join(store, THEIRS, ALL, accept_code=False)
    assert "begun with other code (torch 2 there, 3 here)" in caplog.text
    assert word(store) == {**THEIRS, "parts": "1"}


def test_equal_code_that_now_does_a_part_is_known_as_shared(store):
    join(store, OURS, ALL, accept_code=False)
    join(store, OURS, PART, accept_code=False)
    assert word(store)["parts"] == "2"
    with pytest.raises(UserError, match="other code"):
        join(store, THEIRS, ALL, accept_code=False)


@pytest.mark.parametrize("damaged", [b"", b'{"torch": "2', b"\xff\xfe", b"[1]", b'{"torch": 2}'])
def test_a_damaged_word_ends_no_machine_that_is_alone(store, damaged, caplog):
    store.put(KEY, damaged)
    with pytest.raises(IntegrityError, match=r"run\.json.*--accept-code"):
        join(store, OURS, PART, accept_code=False)
    with caplog.at_level(logging.WARNING):
        join(store, OURS, ALL, accept_code=False)
    assert "written anew" in caplog.text
    assert word(store) == {**OURS, "parts": "1"}


def test_a_store_that_keeps_a_part_of_the_word_is_asked_again():
    lying = FaultyStore(MemoryStore(), faults=lambda operation, _, n: (
        Fault.TRUNCATED if operation == "put" and n < 3 else None))  # fmt: skip
    join(lying, OURS, PART, accept_code=False)
    assert word(lying) == {**OURS, "parts": "2"}
    assert lying.injected[Fault.TRUNCATED] == 2


def test_one_that_keeps_it_never_is_told():
    lying = FaultyStore(MemoryStore(), faults={Fault.EMPTY: 1.0})
    with pytest.raises(IntegrityError, match=r"run\.json: the store has"):
        join(lying, OURS, PART, accept_code=False)


def test_a_store_that_refuses_is_told():
    away = FaultyStore(MemoryStore(), faults={Fault.ERROR_BEFORE: 1.0})
    with pytest.raises(StoreFailed):
        join(away, OURS, ALL, accept_code=False)
