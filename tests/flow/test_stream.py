import os
from itertools import islice

import psutil
import pytest

import flow_workers
from paceline.durable.errors import DataError, WorkerFailed
from paceline.flow.stream import map_stream


@pytest.fixture(autouse=True)
def no_worker_is_left():
    before = _workers()
    yield
    assert _workers() <= before


def _workers() -> set[int]:
    """Children that run; other tests may have left some of their own."""
    children = psutil.Process().children()
    return {c.pid for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE}


def _name(item: int) -> str:
    return f"number {item}"


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_the_order_of_the_items(workers):
    results = map_stream(flow_workers.unequal, 10, range(40), workers=workers, name=_name)
    got = list(results)
    assert [value for value, _ in got] == [item * item + 10 for item in range(40)]
    assert ({pid for _, pid in got} == {os.getpid()}) == (workers == 1)


def test_no_more_is_taken_from_the_stream_than_a_few_for_each_worker():
    taken = []

    def items():
        for item in range(1000):
            taken.append(item)
            yield item

    results = map_stream(flow_workers.unequal, 0, items(), workers=2, name=_name)
    assert len(list(islice(results, 5))) == 5
    assert len(taken) <= 5 + 2 * 3 + 1
    results.close()


def test_an_empty_stream_has_no_results():
    assert list(map_stream(flow_workers.unequal, 0, [], workers=2, name=_name)) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_ours_comes_as_it_is(workers):
    with pytest.raises(DataError, match="row 3"):
        list(map_stream(flow_workers.refusing, 3, range(9), workers=workers, name=_name))


@pytest.mark.parametrize(("how", "told"), [("raise", "ValueError: item 3"), ("die", "SIGKILL")])
def test_other_errors_and_deaths_name_the_item(how, told):
    with pytest.raises(WorkerFailed, match=told) as failed:
        list(map_stream(flow_workers.failing, how, range(9), workers=2, name=_name))
    assert "number 3" in str(failed.value)


def test_an_error_of_the_stream_itself_ends_the_workers():
    def items():
        yield from range(5)
        raise DataError("the file ends here")

    with pytest.raises(DataError, match="ends here"):
        list(map_stream(flow_workers.unequal, 0, items(), workers=2, name=_name))
