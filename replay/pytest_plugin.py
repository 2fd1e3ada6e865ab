"""A pytest fixture that switches replay on; name this module in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from twinstep.replay.triton.driver import activate, deactivate


@pytest.fixture
def replay() -> Iterator[None]:
    """Kernels launched on CPU tensors execute their compiled PTX for the length of the test."""
    activate()
    try:
        yield
    finally:
        deactivate()
