import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tests run side by side: two threads in each would only wait for one another."""
    torch.set_num_threads(1)
