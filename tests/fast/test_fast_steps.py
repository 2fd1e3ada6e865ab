"""Steps over lists equal the reference bit for bit, on the compiled kernels."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import twinstep.reference.adam
import twinstep.reference.sgd
from twinstep.fast.kernels.adam import adam_step_, adamw_step_
from twinstep.fast.kernels.sgd import sgd_step_
from twinstep.parity.cases.fixed_inputs import moderate
from twinstep.parity.expected.ulp import same

pytestmark = pytest.mark.usefixtures("replay")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
COMBINATIONS = {
    "fp32": (FP32, FP32, None),
    "fp16": (FP32, FP16, FP16),
    "bf16": (FP32, BF16, BF16),
    "fp16-pure": (FP16, FP16, None),
    "bf16-pure": (BF16, BF16, None),
    "fp32-to-bf16": (FP32, FP32, BF16),
}
LAYOUTS = {"flat": [2049], "flat among empties": [0, 131, 0], "list": [1, 2048, 0, 2047, 600]}


def f64(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def assert_same(got: list[list[Tensor]], want: Any) -> None:
    """Compare every written tensor; the message names the role and the place in its list."""
    for role, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert len(ours) == len(theirs)
        for slot, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert one.dtype == other.dtype
            assert bool(same(one, other).all()), (role, slot, one, other)


def clones(lists: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[tensor.clone() for tensor in tensors] for tensors in lists]


def step_lists(
    sizes: list[int], dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None], state: int
) -> list[list[Tensor]]:
    """Params, grads, `state` fp32 lists (the last of them positive), copies, steps."""
    param, grad, copy = dtypes
    kinds = [param, grad, *[FP32] * state, *([copy] if copy else [])]
    lists = [
        [moderate(n, 31 * role + slot, kind) for slot, n in enumerate(sizes)]
        for role, kind in enumerate(kinds)
    ]
    lists[1 + state] = [tensor.abs() for tensor in lists[1 + state]]
    if copy is None:
        lists.append([])
    return [*lists, [torch.tensor(3 * slot) for slot in range(len(sizes))]]


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtypes", COMBINATIONS.values(), ids=COMBINATIONS.keys())
@pytest.mark.parametrize("name", ["adam_step", "adamw_step"])
def test_an_adam_step_equals_the_reference(
    name: str, dtypes: Any, sizes: list[int], bias_correction: bool
) -> None:
    lists = step_lists(sizes, dtypes, 2)
    controls = {"lr": f64(1.3e-3), "beta1": f64(0.87), "beta2": f64(0.9871), "eps": f64(3e-7)}
    controls |= {"weight_decay": f64(0.07), "factor": torch.tensor(0.37)}
    for found_inf in (0.0, 1.0):
        ours = clones(lists)
        options: dict[str, Any] = {**controls, "found_inf": torch.tensor(found_inf)}
        step = adamw_step_ if name == "adamw_step" else adam_step_
        step(*ours, **options, bias_correction=bias_correction)
        twin = getattr(twinstep.reference.adam, name)
        want = twin(*clones(lists), **options, bias_correction=bias_correction)
        assert_same([ours[0], *ours[2:]], want)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtypes", [COMBINATIONS[k] for k in ("fp32", "bf16", "fp16-pure")])
def test_an_sgd_step_equals_the_reference(
    dtypes: Any, sizes: list[int], momentum: bool, nesterov: bool
) -> None:
    lists = step_lists(sizes, dtypes, 1)
    if not momentum:
        lists[2] = []
    controls = {"lr": f64(0.013), "momentum": f64(0.9), "dampening": f64(0.11)}
    controls |= {"weight_decay": f64(0.07), "factor": torch.tensor(0.37)}
    for found_inf in (0.0, 1.0):
        ours = clones(lists)
        options: dict[str, Any] = {**controls, "found_inf": torch.tensor(found_inf)}
        sgd_step_(*ours, **options, nesterov=nesterov)
        want = twinstep.reference.sgd.sgd_step(*clones(lists), **options, nesterov=nesterov)
        assert_same([ours[0], *ours[2:]], want)


def test_dtypes_mix_in_one_list() -> None:
    rows = [step_lists([300], COMBINATIONS[k], 2) for k in ("fp16-pure", "bf16-pure", "fp32")]
    lists = [[row[role][0] for row in rows] for role in range(4)]
    lists += [[], [torch.tensor(slot) for slot in range(3)]]
    controls: dict[str, Any] = {"lr": f64(0.1), "beta1": f64(0.9), "beta2": f64(0.99)}
    controls |= {"eps": f64(1e-8), "weight_decay": f64(0.1), "factor": torch.tensor(0.5)}
    controls |= {"found_inf": torch.tensor(0.0), "bias_correction": True}
    ours = clones(lists)
    adamw_step_(*ours, **controls)
    assert_same(
        [ours[0], *ours[2:]], twinstep.reference.adam.adamw_step(*clones(lists), **controls)
    )


def test_misaligned_tensors_take_the_scalar_path_to_the_same_bits() -> None:
    lists = step_lists([5000, 5000], COMBINATIONS["bf16"], 2)
    controls: dict[str, Any] = {"lr": f64(0.1), "beta1": f64(0.9), "beta2": f64(0.99)}
    controls |= {"eps": f64(1e-8), "weight_decay": f64(0.1), "factor": torch.tensor(0.5)}
    controls |= {"found_inf": torch.tensor(0.0), "bias_correction": True}
    want = twinstep.reference.adam.adamw_step(*clones(lists), **controls)
    for shifted in (range(5), [0], [1], [4]):
        ours = clones(lists)
        for role in shifted:
            for slot, tensor in enumerate(ours[role]):
                room = torch.empty(tensor.numel() + 3, dtype=tensor.dtype)
                ours[role][slot] = room[3:].copy_(tensor)
        adamw_step_(*ours, **controls)
        assert_same([ours[0], *ours[2:]], want)


def test_the_first_step_of_sgd_ignores_what_the_buffer_holds() -> None:
    params, grads = [torch.ones(5)], [torch.ones(5)]
    buffers = [torch.full((5,), math.nan)]
    controls = {"lr": f64(0.5), "momentum": f64(0.9), "dampening": f64(0.5)}
    controls |= {"weight_decay": f64(0.0), "factor": torch.tensor(1.0)}
    found_inf = torch.tensor(0.0)
    steps = [torch.tensor(0)]
    sgd_step_(params, grads, buffers, [], steps, **controls, found_inf=found_inf, nesterov=False)
    assert torch.equal(params[0], torch.full((5,), 0.5))
    assert torch.equal(buffers[0], torch.ones(5))
    assert steps[0].item() == 1


def test_an_empty_list_is_a_step_over_nothing() -> None:
    controls: dict[str, Any] = {"lr": f64(0.1), "beta1": f64(0.9), "beta2": f64(0.99)}
    controls |= {"eps": f64(1e-8), "weight_decay": f64(0.1), "factor": torch.tensor(0.5)}
    adam_step_(
        [], [], [], [], [], [], **controls, found_inf=torch.tensor(0.0), bias_correction=True
    )


def test_many_counters_advance_together() -> None:
    count = 300
    lists = step_lists([1] * count, COMBINATIONS["fp32"], 2)
    controls: dict[str, Any] = {"lr": f64(0.1), "beta1": f64(0.9), "beta2": f64(0.99)}
    controls |= {"eps": f64(1e-8), "weight_decay": f64(0.1), "factor": torch.tensor(0.5)}
    controls |= {"found_inf": torch.tensor(0.0), "bias_correction": True}
    ours = clones(lists)
    adam_step_(*ours, **controls)
    assert [step.item() for step in ours[5]] == [3 * slot + 1 for slot in range(count)]
    assert_same([ours[0], *ours[2:]], twinstep.reference.adam.adam_step(*clones(lists), **controls))


def test_the_comparison_refuses_a_flipped_sign_of_zero() -> None:
    with pytest.raises(AssertionError):
        assert_same([[torch.zeros(1)]], [[-torch.zeros(1)]])
