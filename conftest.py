"""Fixtures of all tests: a device, a dtype, replay; and the number of examples of a property."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis.database import DirectoryBasedExampleDatabase

pytest_plugins = ["twinstep.replay.pytest_plugin"]

EXAMPLES = Path(__file__).resolve().parent / ".hypothesis" / "examples"

# The gate must answer the same on every run: same examples, no clock. What the long profile finds
# is kept in the database and tried first on its next run.
hypothesis.settings.register_profile(
    "gate", derandomize=True, deadline=None, database=None, print_blob=True
)
hypothesis.settings.register_profile(
    "property",
    max_examples=2000,
    deadline=None,
    database=DirectoryBasedExampleDatabase(EXAMPLES),
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("gate")

# Each full collection walks through what all tests so far have left, up to a second long.
gc.set_threshold(700, 10, 100)

FAST = Path(__file__).resolve().parent / "fast"

NO_GPU = "needs a CUDA GPU; this machine shows none to torch"

# A suite started by nohup or & ignores Ctrl-C, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores; torch would start as many threads in each as there are.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu`, by name, where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_report_header() -> list[str]:
    """Name what decides the bits, so that a log is never anonymous."""
    import triton

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return [f"torch {torch.__version__}, triton {triton.__version__}, GPU: {gpu}"]


@pytest.fixture(autouse=True)
def _generator_starts_anew() -> None:
    """What a test draws may not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _engine_is_left_as_it_was() -> Iterator[None]:
    """A test that leaves replay switched on would change what later ones are refused."""
    before = _replays()
    yield
    assert _replays() == before, "the test left replay switched on, or off"


@pytest.fixture(autouse=True)
def _registry_is_left_as_it_was() -> Iterator[None]:
    """A kernel or class that stays registered is a row of ours to later tests."""
    yield
    strange = _strangers()
    assert not strange, f"the test left these registered: {', '.join(strange)}"


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """One that stays is met by every later test that makes its own."""
    before = torch.distributed.is_initialized()
    yield
    assert torch.distributed.is_initialized() == before, "the test left a process group behind"


def pytest_collection_finish() -> None:
    """No test module may register by being imported."""
    strange = _strangers()
    assert not strange, f"test modules registered these when imported: {', '.join(strange)}"


def _strangers() -> list[str]:
    kernels = sys.modules.get("twinstep.parity.registry.kernels")
    classes = sys.modules.get("twinstep.parity.sequences.registry")
    rows = [*(kernels.kernels() if kernels else ()), *(classes.twins() if classes else ())]
    return [
        row.name for row in rows if FAST not in Path(row.place.rpartition(":")[0]).resolve().parents
    ]


def _replays() -> bool:
    driver = sys.modules.get("twinstep.replay.triton.driver")
    return driver is not None and driver.active()


@pytest.fixture
def device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=[torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Each of the three stored dtypes in turn."""
    chosen = request.param
    assert isinstance(chosen, torch.dtype)
    return chosen
