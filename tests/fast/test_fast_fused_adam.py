"""FusedAdam is an ordinary optimizer whose steps equal the reference's, bit for bit."""

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

import twinstep.reference.optimizers.fused_adam
from twinstep.contract.compat import Compat
from twinstep.fast.fused_adam import FusedAdam
from twinstep.parity.cases.fixed_inputs import moderate
from twinstep.parity.expected.ulp import same

pytestmark = pytest.mark.usefixtures("replay")

MIXED = (torch.float16, torch.bfloat16, torch.float32)


def parameters(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Leaf tensors of the three dtypes in turn."""
    return [
        moderate(torch.Size(shape).numel(), slot, MIXED[slot % 3]).reshape(shape).requires_grad_()
        for slot, shape in enumerate(shapes)
    ]


class Twins:
    """The same parameters under both optimizers."""

    def __init__(self, shapes: list[tuple[int, ...]], **options: Any) -> None:
        compat = options.pop("compat", {})
        self.params = [parameters(shapes), parameters(shapes)]
        self.fast = FusedAdam(self.params[0], **options, compat=Compat(**compat))
        self.reference = twinstep.reference.optimizers.fused_adam.FusedAdam(
            self.params[1], **options, compat=Compat(**compat)
        )

    def step(self, seed: int, missing: tuple[int, ...] = ()) -> None:
        """Give both sides the same gradients and step them."""
        for params in self.params:
            for slot, param in enumerate(params):
                grad = moderate(param.numel(), 50 * seed + slot, param.dtype)
                param.grad = None if slot in missing else grad.reshape(param.shape)
        self.fast.step()
        self.reference.step()

    def check(self) -> None:
        """Compare parameters and state."""
        for one, other in zip(*self.params, strict=True):
            assert bool(same(one.detach(), other.detach()).all()), (one, other)
            ours, theirs = self.fast.state[one], self.reference.state[other]
            assert ours.keys() == theirs.keys()
            for name in ours:
                assert ours[name].dtype == theirs[name].dtype
                assert bool(same(ours[name], theirs[name]).all()), name


SHAPES: list[tuple[int, ...]] = [(3, 700), (0,), (5,), (2049,), (), (64, 33)]


@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_steps_equal_the_reference(adam_w_mode: bool, bias_correction: bool) -> None:
    options = {"adam_w_mode": adam_w_mode, "bias_correction": bias_correction}
    twins = Twins(SHAPES, lr=0.03, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, **options)
    for seed, missing in enumerate([(), (0, 3), (5,), ()]):
        twins.step(seed, missing)
        twins.check()


def test_one_parameter_takes_the_flat_kernel_to_the_same_bits() -> None:
    twins = Twins([(4100,)], lr=0.03, weight_decay=-0.1)
    for seed in range(3):
        twins.step(seed)
    twins.check()


@pytest.mark.parametrize(
    "fields",
    [
        {"shared_step_counter": True},
        {"moments_in_param_dtype": True},
        {"shared_step_counter": True, "moments_in_param_dtype": True},
    ],
)
def test_compat_equals_the_reference(fields: dict[str, bool]) -> None:
    twins = Twins([(30,), (40,), (50,), (60,)], lr=0.1, compat=fields)
    for seed, missing in enumerate([(), (3,), ()]):
        twins.step(seed, missing)
    twins.check()


Schedule = Callable[[torch.optim.Optimizer], Any]


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: LambdaLR(o, lambda epoch: 1.0 / (1 + epoch)),
        lambda o: OneCycleLR(o, max_lr=0.1, total_steps=8),
        lambda o: CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=2, cycle_momentum=True),
    ],
    ids=["lambda", "one cycle", "cyclic"],
)
def test_schedules_of_lr_and_betas_reach_the_kernels(schedule: Schedule) -> None:
    twins = Twins([(300,), (40,)], lr=0.05)
    schedules = [schedule(twins.fast), schedule(twins.reference)]
    for seed in range(5):
        twins.step(seed)
        for each in schedules:
            each.step()
    twins.check()


def test_lr_may_be_a_tensor_of_either_precision() -> None:
    for dtype in (torch.float32, torch.float64):
        twins = Twins([(300,), (40,)], lr=torch.tensor(0.1, dtype=dtype))
        for seed in range(3):
            twins.step(seed)
            for optimizer in (twins.fast, twins.reference):
                optimizer.param_groups[0]["lr"].mul_(0.5)
        twins.check()


def test_groups_keep_their_own_hyper_parameters() -> None:
    twins = Twins([(300,)], lr=0.1)
    extra = [parameters([(10,), (20,)]) for _ in range(2)]
    for optimizer, params, added in zip(
        (twins.fast, twins.reference), twins.params, extra, strict=True
    ):
        optimizer.add_param_group({"params": added, "lr": 0.5, "betas": (0.1, 0.2)})
        params.extend(added)
    for seed in range(2):
        twins.step(seed)
    twins.check()


def layouts() -> Iterator[Any]:
    """Parameters and gradients whose elements do not lie in order."""
    dense = lambda: moderate(600, 1, torch.float32).reshape(20, 30).t()  # noqa: E731
    strided = lambda: moderate(1200, 1, torch.float32).reshape(30, 40)[:, :20]  # noqa: E731
    plain = lambda: moderate(600, 1, torch.float32).reshape(30, 20)  # noqa: E731
    for name, one, other in (
        ("dense both", dense, dense),
        ("dense param", dense, plain),
        ("dense grad", plain, dense),
        ("strided param", strided, plain),
        ("strided both", strided, strided),
    ):
        yield pytest.param(one, other, id=name)


@pytest.mark.parametrize(("param", "grad"), list(layouts()))
def test_any_layout_steps_like_a_contiguous_one(
    param: Callable[[], Tensor], grad: Callable[[], Tensor]
) -> None:
    odd = param().requires_grad_()
    even = param().contiguous().requires_grad_()
    optimizers = [FusedAdam([each], lr=0.1, weight_decay=0.1) for each in (odd, even)]
    for _ in range(2):
        odd.grad, even.grad = grad(), grad().contiguous()
        for optimizer in optimizers:
            optimizer.step()
    assert bool(same(odd.detach(), even.detach()).all())
    assert odd.stride() == param().stride()


def test_a_saved_state_loads_without_losing_a_bit() -> None:
    twins = Twins([(300,), (40,), (50,)], lr=0.1)
    twins.step(0)
    file = io.BytesIO()
    torch.save(twins.fast.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    params = [param.detach().clone().requires_grad_() for param in twins.params[0]]
    loaded = FusedAdam(params, lr=9.0)
    loaded.load_state_dict(state)
    for old, new in zip(twins.params[0], params, strict=True):
        for name, value in twins.fast.state[old].items():
            assert loaded.state[new][name].dtype == value.dtype
            assert bool(same(loaded.state[new][name], value).all())
    twins.fast, twins.params[0] = loaded, params
    twins.step(1)
    twins.check()


def test_loading_copies_and_later_steps_leave_the_dict_alone() -> None:
    twins = Twins([(30,)], lr=0.1)
    twins.step(0)
    state = twins.fast.state_dict()
    kept = copy.deepcopy(state)
    twins.fast.load_state_dict(state)
    twins.step(1)
    assert torch.equal(state["state"][0]["exp_avg"], kept["state"][0]["exp_avg"])
    assert state["state"][0]["step"].item() == 1


def test_a_broken_counter_is_refused_and_nothing_is_loaded() -> None:
    twins = Twins([(30,)], lr=0.1)
    twins.step(0)
    state = copy.deepcopy(twins.fast.state_dict())
    state["state"][0]["step"] = torch.tensor(1.5)
    with pytest.raises(ValueError, match=r"step=1\.5, but should be a whole number of steps"):
        twins.fast.load_state_dict(state)
    twins.step(1)
    twins.check()


def test_counters_of_torch_are_accepted() -> None:
    params = parameters([(1,), (1,), (30,)])[2:]
    theirs = torch.optim.Adam(params, lr=0.1)
    params[0].grad = torch.ones(30)
    theirs.step()
    ours = FusedAdam(params, lr=0.1)
    ours.load_state_dict(theirs.state_dict())
    assert ours.state[params[0]]["step"].dtype == torch.int64
    assert ours.state[params[0]]["step"].item() == 1


def test_a_copied_or_pickled_optimizer_goes_on() -> None:
    twins = Twins([(30,), (40,)], lr=0.1, adam_w_mode=False, set_grad_none=False)
    twins.step(0)
    twin = copy.deepcopy(twins.fast)
    assert (twin.adam_w_mode, twin.set_grad_none) == (False, False)
    twins.fast = twin
    twins.params[0] = twin.param_groups[0]["params"]
    twins.step(1)
    twins.check()


def test_the_closure_runs_with_gradients_and_its_loss_comes_back() -> None:
    param = torch.ones(5, requires_grad=True)
    optimizer = FusedAdam([param], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (param * param).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 5.0
    assert param.grad is not None


@pytest.mark.parametrize(
    ("constructed", "asked", "dropped"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
def test_zero_grad_drops_or_zeroes(constructed: bool, asked: bool | None, dropped: bool) -> None:
    param = torch.ones(5, requires_grad=True)
    param.grad = torch.ones(5)
    FusedAdam([param], set_grad_none=constructed).zero_grad(asked)
    assert (param.grad is None) == dropped
    assert dropped or not param.grad.any()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"amsgrad": True}, RuntimeError, "amsgrad=True, but should be False"),
        ({"lr": -1.0}, ValueError, r"lr=-1\.0, but should be at least 0"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\]=1\.0, but should be in \[0, 1\)"),
        ({"betas": 0.9}, TypeError, r"betas=0\.9, but should be two numbers"),
        ({"eps": float("nan")}, ValueError, r"eps=nan, but should be finite"),
        ({"weight_decay": "x"}, TypeError, r"weight_decay='x', but should be a number"),
        ({"lr": torch.zeros(2)}, ValueError, r"lr has shape \(2,\), but should have one element"),
        ({"bias_correction": 1.0}, TypeError, r"bias_correction=1\.0"),
    ],
)
def test_hyper_parameters_are_checked_at_the_door(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        FusedAdam([torch.ones(1, requires_grad=True)], **options)


def test_odd_parameters_are_refused_and_not_added() -> None:
    optimizer = FusedAdam([torch.ones(1, requires_grad=True)])
    with pytest.raises(ValueError, match="parameter is float64, but should be"):
        optimizer.add_param_group({"params": [torch.ones(1, dtype=torch.float64)]})
    with pytest.raises(ValueError, match="should have memory of its own for each element"):
        optimizer.add_param_group({"params": [torch.ones(1).expand(4)]})
    assert len(optimizer.param_groups) == 1


def test_a_sparse_gradient_is_refused_before_anything_is_written() -> None:
    params = [torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)]
    optimizer = FusedAdam(params)
    params[0].grad, params[1].grad = torch.ones(3), torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match=r"gradient has layout torch\.sparse_coo"):
        optimizer.step()
    assert torch.equal(params[0].detach(), torch.ones(3))
