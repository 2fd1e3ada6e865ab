"""FusedLAMB of both sides: one norm over all groups, a counter of each group, and apex's files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import twinstep.fast.optimizers.apex_lamb
from tests.helpers.battery import Subject, fill, observed, parameters
from tests.helpers.sides import CLASSES, SIDES
from twinstep.parity.cases.fixed_inputs import bits, moderate

pytestmark = [
    pytest.mark.usefixtures("replay"),
    pytest.mark.parametrize("subject", [Subject(side, "FusedLAMB") for side in SIDES], ids=str),
]
SIGNATURE = (
    *("params", "lr", "bias_correction", "betas", "eps", "weight_decay", "amsgrad", "adam_w_mode"),
    *("grad_averaging", "set_grad_none", "max_grad_norm", "use_nvlamb"),
)
DEFAULTS = (1e-3, True, (0.9, 0.999), 1e-6, 0.01, False, True, True, True, 1.0, False)
HALF = torch.float16


def test_arguments_stand_where_apex_has_them(subject: Subject) -> None:
    params = parameters((2,), torch.float32)
    optimizer = CLASSES[subject.side]["FusedLAMB"](params, *DEFAULTS)
    assert optimizer.defaults == subject(params).defaults
    values = dict(zip(SIGNATURE[1:], DEFAULTS, strict=True))
    group = optimizer.param_groups[0]
    assert all(group.get(name, values[name]) == values[name] for name in values)
    assert (optimizer.adam_w_mode, optimizer.set_grad_none, optimizer.use_nvlamb) == (1, 1, 0)


def test_gradients_are_dropped_or_kept_as_the_constructor_says(subject: Subject) -> None:
    for drops in (True, False):
        params = parameters((2,), torch.float32)
        fill(params, 1)
        subject(params, set_grad_none=drops).zero_grad()
        assert (params[0].grad is None) == drops


def test_the_norm_is_that_of_all_groups(subject: Subject) -> None:
    """A large gradient in one group shortens the moments of another one."""
    first = []
    for other in (0.5, 400.0):
        one, two = (Parameter(torch.ones(2)) for _ in range(2))
        optimizer = subject([{"params": [one]}, {"params": [two]}])
        one.grad, two.grad = torch.tensor([0.3, 0.4]), torch.full((2,), other)
        optimizer.step()
        first.append(optimizer.state[one]["exp_avg"])
        assert bits(one.grad) == bits(torch.tensor([0.3, 0.4]))
    assert bits(first[0]) == bits(torch.tensor([0.3, 0.4]) * torch.tensor(1.0 - 0.9))
    torch.testing.assert_close(first[1], first[0] / (2 * 400.0**2 + 0.25) ** 0.5)


def test_a_group_counts_every_step_and_a_late_gradient_finds_its_number(subject: Subject) -> None:
    """Apex counts in the group: a late parameter is corrected as if it had been there."""
    late, always = (Parameter(torch.ones(2)) for _ in range(2))
    optimizer = subject([late, always], lr=0.25, weight_decay=0.0, eps=0.0, max_grad_norm=0.0)
    for with_late in (False, True):
        always.grad = torch.ones(2)
        late.grad = torch.ones(2) if with_late else None
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2
    # (0.1 / 0.19) / sqrt(0.001 / 0.001999), by hand.
    assert late.tolist() == pytest.approx([1 - 0.25 * 0.52632 * 1.413860] * 2, rel=1e-5)
    assert always.tolist() == pytest.approx([0.5, 0.5], rel=1e-5)
    subject([always]).step()


def test_a_new_largest_norm_counts_from_the_next_step_on(subject: Subject) -> None:
    """Though nothing else of the group has changed."""
    param = Parameter(torch.ones(2))
    optimizer = subject([param], betas=(0.5, 0.999), max_grad_norm=1.0)
    found = []
    for limit in (1.0, 0.0):
        optimizer.param_groups[0]["max_grad_norm"] = limit
        param.grad = torch.tensor([3.0, 4.0])
        optimizer.step()
        found.append(optimizer.state[param]["exp_avg"].tolist())
    assert found == [pytest.approx([0.3, 0.4]), pytest.approx([1.65, 2.2])]


def test_a_step_without_any_gradient_counts_and_changes_nothing(subject: Subject) -> None:
    param = Parameter(torch.ones(2))
    optimizer = subject([param])
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["step"] == 1
    assert not optimizer.state
    assert param.tolist() == [1.0, 1.0]


def of_apex(param: Tensor, steps: int | None) -> dict[str, Any]:
    """A file as apex's FusedLAMB writes it: moments in the parameter's dtype, no own counter."""
    moments = {
        name: moderate(param.numel(), at, param.dtype).abs()
        for at, name in enumerate(("exp_avg", "exp_avg_sq"))
    }
    group = {"lr": 0.5, "bias_correction": True, "betas": (0.8, 0.9), "eps": 1e-6}
    group |= {"weight_decay": 0.1, "grad_averaging": True, "max_grad_norm": 1.0, "params": [0]}
    counted = {} if steps is None else {"step": steps}
    return {"state": {0: moments} if steps else {}, "param_groups": [{**group, **counted}]}


def test_a_file_of_apex_is_taken_and_ours_has_its_layout(subject: Subject) -> None:
    param = Parameter(moderate(6, 1, HALF))
    optimizer, file = subject([param]), of_apex(param, 7)
    optimizer.load_state_dict(file)
    ours = optimizer.state_dict()
    assert ours["param_groups"] == file["param_groups"]
    assert ours["state"][0].keys() == file["state"][0].keys()
    for name, moment in file["state"][0].items():
        assert bits(ours["state"][0][name]) == bits(moment.float())
    fill([param], 3)
    optimizer.step()
    assert type(optimizer.param_groups[0]["step"]) is int
    assert optimizer.param_groups[0]["step"] == 8
    optimizer.load_state_dict(of_apex(param, None))
    assert optimizer.param_groups[0]["step"] == 0
    assert not optimizer.state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 1.5}, "step=1.5, but should be a whole number of steps"),
        ({"max_coeff": 10.0}, "state has max_coeff, as that of DeepSpeed's LAMB, but FusedLAMB"),
        ({"max_grad_norm": "one"}, "max_grad_norm='one', but should be a number"),
        ({"amsgrad": True}, "amsgrad=True, but should be False: FusedLAMB has none"),
    ],
)
def test_a_file_of_another_optimizer_is_refused(
    subject: Subject, change: dict[str, Any], message: str
) -> None:
    param = Parameter(moderate(6, 1, HALF))
    optimizer, file = subject([param]), of_apex(param, 7)
    before = observed(optimizer, [param])
    file["param_groups"][0] |= change
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(file)
    assert observed(optimizer, [param]) == before
    adam = CLASSES[subject.side]["FusedAdam"]([param])
    with pytest.raises(ValueError, match="grad_averaging, as that of apex's LAMB, but FusedAdam"):
        adam.load_state_dict(of_apex(param, 7))


def test_a_counter_of_a_group_must_count_steps(subject: Subject) -> None:
    with pytest.raises(ValueError, match="step=-1, but should be a whole number of steps"):
        subject([{"params": parameters((2,), HALF), "step": -1}])


def test_parameters_on_two_devices_are_refused(subject: Subject) -> None:
    here, there = Parameter(torch.ones(2)), Parameter(torch.ones(2, device="meta"))
    optimizer = subject([here, there])
    here.grad, there.grad = torch.ones(2), torch.ones(2, device="meta")
    with pytest.raises(ValueError, match="parameters are on cpu, meta, but should be on one dev"):
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 0


@pytest.mark.parametrize("name", ["BF16Optimizer", "ZeroOptimizer", "FP16Optimizer"])
def test_where_a_rank_holds_a_part_of_the_gradients_it_is_refused(
    subject: Subject, name: str
) -> None:
    params = parameters((4,), torch.bfloat16 if name == "BF16Optimizer" else HALF)
    more: dict[str, Any] = {"mpu": object()} if name == "FP16Optimizer" else {}
    more |= {"param_names": {params[0]: "one"}} if name != "FP16Optimizer" else {}
    says = f"init_optimizer is FusedLAMB.* a rank has a part of them here .{name}"
    with pytest.raises(TypeError, match=says):
        CLASSES[subject.side][name](subject(params), **more)


def test_a_wrapper_hands_it_no_gradients_and_scale(subject: Subject) -> None:
    with pytest.raises(TypeError, match="FusedLAMB.step takes no grads, output_params, scale"):
        Subject(subject.side, "FP16UnfusedOptimizer")(
            parameters((4,), HALF), inside="FusedLAMB", fused_lamb_legacy=True
        )
    optimizer = subject(parameters((2,), HALF))
    with pytest.raises(RuntimeError, match="scale was given, but should not be"):
        optimizer.step(scale=2.0)


def test_a_step_cannot_be_captured_on_the_fast_side(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = parameters((2,), torch.float32)
    fill(params, 1)
    optimizer = subject(params)
    monkeypatch.setattr(twinstep.fast.optimizers.apex_lamb, "is_capturing", lambda _: True)
    if subject.side == "reference":
        optimizer.step()
        return
    with pytest.raises(RuntimeError, match="being captured in a CUDA graph, but should be called"):
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 0
