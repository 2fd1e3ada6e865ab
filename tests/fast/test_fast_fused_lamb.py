"""FusedLamb is an ordinary optimizer whose steps equal the reference's, bit for bit."""

import inspect
import io
from typing import Any

import pytest
import torch
from torch import Tensor

import twinstep.reference.optimizers.fused_lamb
from twinstep.fast.fused_lamb import FusedLamb
from twinstep.parity.cases.fixed_inputs import moderate
from twinstep.parity.expected.ulp import same

pytestmark = pytest.mark.usefixtures("replay")

MIXED = (torch.float16, torch.bfloat16, torch.float32)
SHAPES: list[tuple[int, ...]] = [(3, 70), (0,), (5,), (2049,), (), (16, 3)]
OPTIONS: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def both(**options: Any) -> list[tuple[Any, list[Tensor]]]:
    """The two optimizers over equal parameters, each with its list of them."""
    made = []
    for kind in (FusedLamb, twinstep.reference.optimizers.fused_lamb.FusedLamb):
        params = [
            moderate(torch.Size(shape).numel(), slot, MIXED[slot % 3]).reshape(shape)
            for slot, shape in enumerate(SHAPES)
        ]
        for param in params:
            param.requires_grad_()
        made.append((kind(params, **OPTIONS | options), params))
    return made


def fill(params: list[Tensor], seed: int, missing: tuple[int, ...] = ()) -> None:
    for slot, param in enumerate(params):
        grad = moderate(param.numel(), 50 * seed + slot, param.dtype).reshape(param.shape)
        param.grad = None if slot in missing else grad


def check(one: tuple[Any, list[Tensor]], other: tuple[Any, list[Tensor]]) -> None:
    for ours, theirs in zip(one[1], other[1], strict=True):
        assert bool(same(ours.detach(), theirs.detach()).all())
        for name, value in one[0].state[ours].items():
            assert bool(same(value, other[0].state[theirs][name]).all()), name
    assert one[0].get_lamb_coeffs() == other[0].get_lamb_coeffs()


@pytest.mark.parametrize("limit", [0.0, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("inside", [False, True])
def test_steps_equal_the_reference(inside: bool, limit: float) -> None:
    pair = both(eps_inside_sqrt=inside, max_grad_norm=limit)
    for seed, missing in enumerate([(), (0, 3), (5,), ()]):
        for optimizer, params in pair:
            fill(params, seed, missing)
            optimizer.step()
        check(*pair)


def test_tensors_as_limit_and_scale_reach_the_same_bits() -> None:
    pair = both(max_grad_norm=torch.tensor(0.25, dtype=torch.float64))
    for optimizer, params in pair:
        fill(params, 3)
        optimizer.step(scale=torch.tensor(8.0))
    check(*pair)


def test_transposed_parameters_are_stepped_in_place() -> None:
    results = []
    for kind in (FusedLamb, twinstep.reference.optimizers.fused_lamb.FusedLamb):
        make: Any = kind
        param = moderate(12, 1, torch.float32).reshape(3, 4).t().requires_grad_()
        copy = torch.zeros(4, 3, dtype=torch.float16)
        make([param], **OPTIONS).step(
            grads=[moderate(12, 2, torch.float32).reshape(4, 3)], output_params=[copy]
        )
        results.append((param.detach(), copy))
    for ours, theirs in zip(*results, strict=True):
        assert bool(same(ours, theirs).all())


def test_checkpoints_are_interchangeable() -> None:
    pair = both()
    for optimizer, params in pair:
        fill(params, 1)
        optimizer.step()
    files = [io.BytesIO(), io.BytesIO()]
    for (optimizer, _), file in zip(pair, files, strict=True):
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
    for (optimizer, params), file in zip(pair, reversed(files), strict=True):
        optimizer.load_state_dict(torch.load(file, weights_only=True))
        fill(params, 2)
        optimizer.step()
    check(*pair)


def test_a_group_is_four_launches_and_a_second_step_uploads_nothing() -> None:
    import twinstep.replay

    params = [moderate(n, n, torch.float32).requires_grad_() for n in (700, 0, 33)]
    optimizer = FusedLamb(params, **OPTIONS)
    fill(params, 1)
    optimizer.step()
    built = optimizer._cache.built
    with twinstep.replay.launches() as log:
        optimizer.step()
    assert len(log) == 4
    assert optimizer._cache.built == built


def test_a_list_of_another_length_is_refused() -> None:
    (optimizer, params), _ = both()
    before = params[0].detach().clone()
    with pytest.raises(ValueError, match=r"grads has \[1\] tensors per group, but should have"):
        optimizer.step(grads=[torch.ones(3, 70)])
    assert bool(same(params[0].detach(), before).all())


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"min_coeff": -0.5}, "min_coeff=-0.5, but should be at least 0"),
        ({"max_coeff": 0.001}, "max_coeff=0.001, but should be at least min_coeff=0.01"),
    ],
)
def test_impossible_bounds_are_refused(option: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        both(**option)


def test_both_take_the_same_arguments() -> None:
    ours, theirs = (
        inspect.signature(kind.__init__).parameters
        for kind in (FusedLamb, twinstep.reference.optimizers.fused_lamb.FusedLamb)
    )
    assert list(ours) == list(theirs)
    for name in set(ours) - {"self", "params", "compat"}:
        assert (ours[name].default, ours[name].kind) == (theirs[name].default, theirs[name].kind)
