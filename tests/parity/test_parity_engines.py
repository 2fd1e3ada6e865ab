"""Choice of a kernel's engine, and live subnormals."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import twinstep.parity.registry.engines
from twinstep.parity.operations.table import operation_named
from twinstep.parity.records.errors import UsageError
from twinstep.parity.registry.engines import (
    claimed_engines,
    engine_for,
    engine_named,
    live_subnormals,
    require,
    require_live_subnormals,
    running,
    untested_triton,
    uses_triton,
)
from twinstep.parity.registry.kernels import Kernel
from twinstep.replay.cuda.nvrtc import CudaKernel, cuda_kernel


def plain(accumulators: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    """Reaches no Triton kernel."""


def with_triton() -> Callable[..., None]:
    import triton

    def kernel(accumulators: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        triton.cdiv(1, 1)

    return kernel


PLAIN = Kernel(
    name="plain",
    operation=operation_named("accumulate", "test"),
    function=plain,
    arithmetic="bounded",
    dtypes=("bf16",),
    layouts=("list",),
    engines=(),
    place="here:1",
)


def test_a_torch_kernel_runs_on_the_cpu() -> None:
    assert not uses_triton(plain)
    assert engine_for(PLAIN).name == "cpu"


class Launcher:
    """Holds a kernel, and calls what reaches one."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __call__(self, accumulators: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """Call what it holds."""


def test_instances_and_partials_run_where_what_they_hold_does() -> None:
    import triton

    def jitted() -> None:
        """Nothing."""

    for held in (with_triton(), triton.jit(jitted)):
        given: Any = partial(cast(Any, plain), held)
        for kernel in (Launcher(held), Launcher(held).__call__, given):
            assert uses_triton(kernel)
    assert uses_triton(partial(with_triton()))
    for kernel in (Launcher(plain), partial(plain), partial(plain, [])):
        assert not uses_triton(kernel)


def test_a_triton_kernel_runs_on_the_gpu_or_on_replay() -> None:
    kernel = replace(PLAIN, function=with_triton())
    assert uses_triton(kernel.function)
    assert engine_for(kernel).name == ("cuda" if torch.cuda.is_available() else "replay")


SOURCE = """
import functools
import torch
import triton

@triton.jit
def kernel(p):
    pass

def launch(p):
    kernel[(1,)](p)

class Stepper:
    def step(self, p):
        launch(p)

class Updated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p):
        launch(p)

@torch.library.custom_op("twinstep_tests::launch", mutates_args=("p",))
def operator(p: torch.Tensor) -> None:
    launch(p)

STEPPER = Stepper()
later = functools.partial(launch)

def through_a_function(p): launch(p)
def through_a_class(p): Stepper().step(p)
def through_an_instance(p): STEPPER.step(p)
def through_autograd(p): Updated.apply(p)
def through_an_operator(p): operator(p)
def through_the_name_of_an_operator(p): torch.ops.twinstep_tests.launch(p)
def through_a_partial(p): later(p)
def through_a_lambda(p): (lambda: launch(p))()
def beside_it(p): torch.nn.functional.relu(p)
"""


def test_what_a_function_names_decides_and_not_what_stands_beside_it() -> None:
    module: dict[str, Any] = {"__name__": "somewhere"}
    lines = {n: f"{line}\n" for n, line in enumerate(SOURCE.splitlines())}
    linecache.cache["<somewhere>"] = (len(SOURCE), None, list(lines.values()), "<somewhere>")
    exec(compile(SOURCE, "<somewhere>", "exec"), module)
    for name, function in module.items():
        if name.startswith("through"):
            assert uses_triton(function), name
    assert not uses_triton(module["beside_it"])


def test_declared_engines_win() -> None:
    assert engine_for(replace(PLAIN, engines=("cpu",), function=with_triton())).name == "cpu"


def test_a_kernel_that_cannot_run_where_it_is_asked_to_says_why() -> None:
    refused = engine_for(replace(PLAIN, engines=("cpu",)), "replay")
    assert refused.missing == "the kernel runs on cpu, not on replay"


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(UsageError, match='engine "tpu" is unknown'):
        engine_named("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_named() -> None:
    assert engine_named("cuda").missing == "no CUDA GPU here"


def test_flushed_subnormals_are_seen() -> None:
    assert live_subnormals()
    require_live_subnormals("nothing")
    torch.set_flush_denormal(True)
    try:
        assert not live_subnormals()
        with pytest.raises(UsageError, match="flushed to zero after a test"):
            require_live_subnormals("a test")
    finally:
        torch.set_flush_denormal(False)


def test_an_object_without_globals_uses_no_triton() -> None:
    assert not uses_triton(SimpleNamespace(__call__=None))  # type: ignore[arg-type]


def test_replay_of_an_untested_triton_is_missing_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton  # here alone: kernels of a module that knows it are taken for Triton's

    monkeypatch.setattr(twinstep.parity.registry.engines, "version", lambda package: "3.5.1")
    untested_triton.cache_clear()
    try:
        engine = engine_named("replay")
        assert engine.missing.startswith("Triton is 3.5.1, but replay was tested with")
        with pytest.raises(UsageError, match="Triton is 3.5.1"):
            require("replay")
        # Nothing is switched on, so that cells say why they were skipped.
        before = triton.runtime.driver._active
        with running(engine):
            assert triton.runtime.driver._active is before
    finally:
        untested_triton.cache_clear()


def test_cuda_source_runs_on_replay_wherever_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    compiled = CudaKernel("saxpy", "")
    table = {torch.float32: compiled}

    @functools.cache
    def made_later() -> CudaKernel:
        return cuda_kernel("", "saxpy")

    kernels = (lambda x: compiled((1,), (1,), x), lambda x: table[x.dtype]((1,), (1,), x))
    for function in (*kernels, lambda x: made_later()((1,), (1,), x)):
        kernel = replace(PLAIN, function=function)
        assert claimed_engines(kernel) == ("replay",)
        assert engine_for(kernel).name == "replay"
        assert claimed_engines(replace(kernel, engines=("cpu",))) == ("cpu",)
    assert claimed_engines(PLAIN) == ()


def test_a_table_of_triton_kernels_is_found() -> None:
    table = {torch.float32: with_triton()}
    assert uses_triton(lambda x: table[x.dtype](x))
