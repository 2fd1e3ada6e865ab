"""Places where kernels run: a GPU, the CPU, or an engine that executes them there."""

import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from twinstep import fast, replay
from twinstep.fast.kernels.cast import cast_copy_
from twinstep.fast.runtime import dispatch, native


def pair() -> tuple[list[Tensor], list[Tensor]]:
    return [torch.ones(5)], [torch.full((5,), 7.0, dtype=torch.float16)]


def test_cpu_tensors_take_the_twin_and_those_of_an_active_engine_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources, copies = pair()
    cast_copy_(sources, copies)
    assert torch.equal(copies[0], sources[0].half())
    monkeypatch.setattr(native, "launch", lambda *_: pytest.fail("the twin was launched"))
    replay.activate()
    try:
        cast_copy_(sources, copies)
    finally:
        replay.deactivate()


def test_without_a_compiler_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("there is no C++ compiler")

    monkeypatch.setattr(native, "library", missing)
    sources, copies = pair()
    with pytest.raises(RuntimeError, match="there is no C"):
        cast_copy_(sources, copies)
    assert torch.equal(copies[0], torch.full((5,), 7.0, dtype=torch.float16))


def launched() -> Iterator[tuple[str, JITFunction[object]]]:
    """Kernels that some launcher hands to `launch`, by name."""
    for file in sorted((Path(fast.__file__).parent / "kernels").glob("*.py")):
        module = import_module(f"twinstep.fast.kernels.{file.stem}")
        for name, value in vars(module).items():
            if name.endswith("_kernel") and isinstance(value, JITFunction):
                yield name, value


def test_every_kernel_has_a_twin_with_as_many_arguments() -> None:
    text = "\n".join(native.sources().values())
    found = dict(launched())
    assert len(found) > 20
    for name, kernel in found.items():
        (signature,) = re.findall(rf"\nvoid {name}\(([^)]*)\)", text)
        given = [param.name for param in kernel.params if not param.is_constexpr]
        typed = [param for param in given if param in native.TYPED]
        assert signature.count(",") + 1 == len(kernel.params) + len(typed) + 2, name


def test_an_unknown_kind_of_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="tensors are on meta"):
        dispatch.require_engine(torch.device("meta"), "here")


def test_a_driver_that_executes_cpu_tensors_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        executes_cpu_tensors = True

    assert not dispatch.executes_cpu_tensors()
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    assert dispatch.executes_cpu_tensors()


def test_no_programs_means_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        __name__ = "kernel"

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
            raise AssertionError(f"launched on {grid}")

    monkeypatch.setattr(dispatch, "executes_cpu_tensors", lambda: True)
    dispatch.launch(Kernel(), 0, torch.empty(0), ())
