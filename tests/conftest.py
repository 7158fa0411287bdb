import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tests run side by side: two threads in each would only wait for one another."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a CUDA device its tests are skipped, and say so."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
