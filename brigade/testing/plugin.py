"""A fixture and a marker for pytest. Write `pytest_plugins = ["brigade.testing.plugin"]` into your conftest.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from brigade.ranks.runner.machine import count_gpus
from brigade.testing.observed import Observed
from brigade.testing.running import run


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "backend(name): the fixture `ranks` uses this backend, gloo or nccl")


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Callable[..., Observed]:
    """Return `brigade.testing.run` with the backend of the marker `backend`, gloo without one.

    With NCCL, skip the test if there are fewer GPUs than ranks.
    """
    marker = request.node.get_closest_marker("backend")
    backend = marker.args[0] if marker else "gloo"

    @functools.wraps(run)
    def run_on_backend(drive: Callable[..., Any], *arguments: Any, **options: Any) -> Observed:
        size, found = options.get("world_size", 2), count_gpus() if backend == "nccl" else 0
        if backend == "nccl" and found < size and not options.get("share_gpu"):
            pytest.skip(f"{size} ranks need {size} GPUs; there are {found}")
        return run(drive, *arguments, **{"backend": backend, **options})

    return run_on_backend
