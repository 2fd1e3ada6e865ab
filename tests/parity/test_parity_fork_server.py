"""Workers are forked from a server that has imported everything, and are as good as fresh ones."""

from __future__ import annotations

import os
import sys

import pytest

from twinstep.parity.runner.fork_server import beside, fresh_processes, start_server


def modules_and_rows() -> tuple[set[str], int, int]:
    """What a worker knows before it does anything: modules, kernels, optimizers."""
    before = set(sys.modules)
    from twinstep.parity.registry.kernels import kernels
    from twinstep.parity.sequences.registry import twins

    return before, len(kernels()), len(twins())


def fails() -> None:
    raise ValueError("on purpose")


def environment() -> dict[str, str]:
    return dict(os.environ)


def test_the_server_imports_for_all_and_registers_for_nobody() -> None:
    start_server()
    with beside(modules_and_rows) as first, beside(modules_and_rows) as second:
        for modules, kernels, twins in (first(), second()):
            assert {"torch", "triton", "twinstep.replay", "twinstep.fast.kernels.adam"} <= modules
            assert (kernels, twins) == (0, 0)


def test_a_changed_environment_is_seen_by_the_next_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    start_server()
    assert fresh_processes().get_start_method() == "forkserver"
    monkeypatch.setenv("PARITY_TEST_OF_WORKERS", "new")
    assert fresh_processes().get_start_method() == "spawn"
    with beside(environment) as told:
        assert told()["PARITY_TEST_OF_WORKERS"] == "new"


def test_what_a_call_beside_raises_is_raised_here() -> None:
    with beside(fails) as told, pytest.raises(ValueError, match="on purpose"):
        told()
