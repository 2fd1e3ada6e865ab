"""Proofs of whole kernels: right ones are proved, wrong ones never are."""

import pytest

from tests.helpers.proved_kernels import by_torch, by_triton, row
from twinstep.parity.prove.command import prove_situation
from twinstep.parity.prove.prove import NOT_PROVED, PROVED, REFUTED, UNSUPPORTED, Verdict
from twinstep.parity.prove.situations import Situation, situations
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import Kernel, kernels


def small(kernel: Kernel, dtype: str = "fp32") -> Verdict:
    """The verdict on the first small situation."""
    first = next(s for s in situations(kernel, [dtype]) if not s.aligned or not s.layout)
    options = {name: False if value is True else value for name, value in first.options.items()}
    sizes = tuple(min(size, 70) for size in first.sizes)
    return prove_situation(
        Situation(kernel, dtype, first.layout, sizes, first.aligned, options), 60.0
    )


@pytest.mark.parametrize(
    ("name", "dtype", "paths"),
    [
        ("triton.adamw_step", "bf16", 2),
        ("triton.sgd_step", "fp16-pure", 2),
        ("triton.accumulate", "bf16-pure", 1),
        ("triton.unscale", "mixed", 2),
        ("triton.cast_copy", "fp16", 1),
        ("triton.flatten", "bf16", 1),
        ("triton.clip_factor", "scalar", 1),
        ("triton.clip_coefficient", "scalar", 1),
    ],
)
def test_our_kernels_are_proved(name: str, dtype: str, paths: int) -> None:
    register_house()
    kernel = next(k for k in kernels() if k.name == name)
    verdict = small(kernel, dtype)
    assert (verdict.word, verdict.paths) == (PROVED, paths), verdict


def test_a_kernel_of_a_user_is_proved_on_both_sides_of_its_branch() -> None:
    verdict = small(row(by_triton(), "replay"))
    assert (verdict.word, verdict.paths) == (PROVED, 2), verdict
    assert verdict.elements == 2 * (3 * 70 + 1)
    assert verdict.assumes[0].startswith("steps = ")


@pytest.mark.parametrize("fault", ["factor of one", "large rate", "small beta", "contracted"])
def test_a_kernel_that_is_wrong_for_few_values_is_refuted(fault: str) -> None:
    verdict = small(row(by_triton(fault), "replay"))
    assert verdict.word == REFUTED, verdict
    assert "but should be" in verdict.detail


@pytest.mark.parametrize("fault", ["reciprocal", "one value", "halved"])
def test_a_kernel_of_another_formula_is_never_proved(fault: str) -> None:
    verdict = small(row(by_triton(fault), "replay"))
    assert verdict.word in (REFUTED, NOT_PROVED), verdict
    assert verdict.word == REFUTED or "kernel:" in verdict.detail


def test_a_kernel_in_torch_is_proved_and_its_branches_are_followed() -> None:
    assert small(row(by_torch(), "cpu")).word == PROVED
    verdict = small(row(by_torch("branch"), "cpu"))
    assert verdict.word == REFUTED
    assert "factor=" in verdict.detail


def test_an_operation_that_torch_may_fuse_is_named() -> None:
    verdict = small(row(by_torch("fused"), "cpu"))
    assert verdict.word == UNSUPPORTED
    assert "addcmul_" in verdict.detail
    assert "proved_kernels.py" in verdict.detail
