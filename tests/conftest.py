"""What every test shares: one torch thread, repeatable hypothesis cases, GPU tests skipped where there is no GPU."""

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("kdlab", derandomize=True, deadline=None, database=None)
settings.load_profile("kdlab")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch finds no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, torch.cuda.is_available() is False"))
