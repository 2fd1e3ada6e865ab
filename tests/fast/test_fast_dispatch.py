"""Where kernels run: on a GPU, on an engine for CPU tensors, or not at all and said so."""

from collections.abc import Callable

import pytest
import torch
import triton
from torch import Tensor

from twinstep.fast.kernels.cast import cast_copy_
from twinstep.fast.runtime import dispatch


def pair() -> tuple[list[Tensor], list[Tensor]]:
    return [torch.ones(5)], [torch.full((5,), 7.0, dtype=torch.float16)]


def test_cpu_tensors_without_an_engine_are_refused_with_both_remedies() -> None:
    sources, copies = pair()
    with pytest.raises(RuntimeError, match=r"or call twinstep\.replay\.activate"):
        cast_copy_(sources, copies)
    assert torch.equal(copies[0], torch.full((5,), 7.0, dtype=torch.float16))


def test_the_refusal_is_one_sentence_that_names_the_device() -> None:
    with pytest.raises(RuntimeError, match=r"^tensors are on cpu, but .* \[cast_flat_kernel\]$"):
        cast_copy_(*pair())


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
