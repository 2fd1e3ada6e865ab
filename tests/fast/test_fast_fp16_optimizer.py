"""FP16Optimizer in step with the reference, and what its step costs, waits for and compiles."""

import io
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import twinstep.fast.fp16_optimizer
import twinstep.fast.fused_adam
import twinstep.fast.fused_lamb
import twinstep.fast.scalers
import twinstep.reference.optimizers.fp16
import twinstep.reference.optimizers.fused_adam
import twinstep.reference.optimizers.fused_lamb
import twinstep.reference.optimizers.scalers
import twinstep.replay
from twinstep.contract.errors import MinimumLossScale
from twinstep.parity.cases.fixed_inputs import moderate
from twinstep.parity.expected.ulp import same
from twinstep.parity.runner.host_sync import watched

pytestmark = pytest.mark.usefixtures("replay")

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
SIDES: dict[str, dict[str, Any]] = {
    "fast": {
        "wrapper": twinstep.fast.fp16_optimizer.FP16Optimizer,
        "adam": twinstep.fast.fused_adam.FusedAdam,
        "lamb": twinstep.fast.fused_lamb.FusedLamb,
        "scaler": twinstep.fast.scalers.DynamicLossScale,
    },
    "reference": {
        "wrapper": twinstep.reference.optimizers.fp16.FP16Optimizer,
        "adam": twinstep.reference.optimizers.fused_adam.FusedAdam,
        "lamb": twinstep.reference.optimizers.fused_lamb.FusedLamb,
        "scaler": twinstep.reference.optimizers.scalers.DynamicLossScale,
    },
}
SIZES = (70, 0, 300, 5)


class Training:
    """One side: parameters in two groups, an optimizer inside, a wrapper."""

    def __init__(self, side: str, dtype: torch.dtype, inside: str = "adam", **options: Any) -> None:
        kinds = SIDES[side]
        self.params = [torch.nn.Parameter(moderate(n, slot, dtype)) for slot, n in enumerate(SIZES)]
        groups = [{"params": self.params[:3]}, {"params": self.params[3:], "lr": 0.3}]
        scaler = kinds["scaler"](init_scale=64.0, scale_window=2, delayed_shift=1)
        hyper = {"lr": 0.02, "betas": (0.87, 0.987), "weight_decay": 0.03}
        self.optimizer = kinds["wrapper"](
            kinds[inside](groups, **hyper),
            **{"loss_scale_config": scaler, "clip_grad": 0.7, "verbose": False, **options},
        )

    def fill(self, seed: int, bad: float | None = None) -> None:
        """Gradients of a scaled loss, one of which may hold a number that is not finite."""
        for slot, param in enumerate(self.params):
            param.grad = moderate(param.numel(), 100 * seed + slot, param.dtype)
            if bad is not None and slot == 2:
                param.grad[-1] = bad

    def seen(self) -> list[Tensor]:
        """Everything that a step writes."""
        optimizer = self.optimizer
        state = [
            torch.as_tensor(value)
            for master in optimizer.fp32_groups_flat
            for value in optimizer.state.get(master, {}).values()
        ]
        scalars = [optimizer.loss_scale, optimizer.get_global_norm(), optimizer.overflow]
        masters = [master.detach() for master in optimizer.fp32_groups_flat]
        weights = [param.detach() for param in self.params]
        return [*weights, *masters, *state, *map(torch.tensor, scalars)]


def check(one: Training, other: Training) -> None:
    ours, theirs = one.seen(), other.seen()
    assert len(ours) == len(theirs)
    for left, right in zip(ours, theirs, strict=True):
        assert left.dtype == right.dtype
        assert bool(same(left, right).all()), (left, right)
    assert one.optimizer.loss_scaler.state_dict() == other.optimizer.loss_scaler.state_dict()


BADS = (math.inf, None, None, None, math.nan, None, None, None, None, None)


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
@pytest.mark.parametrize("inside", ["adam", "lamb"])
def test_ten_steps_equal_the_reference(inside: str, dtype: torch.dtype) -> None:
    pair = [Training(side, dtype, inside) for side in SIDES]
    scales = set()
    for seed, bad in enumerate(BADS):
        for one in pair:
            one.fill(seed, bad)
            one.optimizer.step()
            assert all(param.grad is None for param in one.params)
        check(pair[0], pair[1])
        scales.add(pair[0].optimizer.loss_scale)
    assert len(scales) > 2


@pytest.mark.parametrize("norm_type", [1.0, math.inf, 3.0])
def test_other_norms_equal_the_reference(norm_type: float) -> None:
    pair = [Training(side, HALF, norm_type=norm_type) for side in SIDES]
    for seed, bad in enumerate((None, math.nan, math.inf, None)):
        for one in pair:
            one.fill(seed, bad)
            one.optimizer.step()
        check(pair[0], pair[1])


def test_a_scaled_backward_and_accumulation_equal_the_reference() -> None:
    pair = [Training(side, HALF) for side in SIDES]
    for seed in range(3):
        for one in pair:
            one.optimizer.override_loss_scale(3.7 if seed == 1 else None)
            for _ in range(2):
                loss = sum(
                    (param.float() * (1.0 + 0.1 * seed)).square().sum() for param in one.params
                )
                one.optimizer.backward(loss)
            one.optimizer.step()
        check(pair[0], pair[1])


@pytest.mark.parametrize("hooked", [False, True], ids=["foreign", "hooked"])
def test_what_kernels_cannot_do_is_left_to_the_optimizer_inside(hooked: bool) -> None:
    results = []
    for kinds in SIDES.values():
        params = [torch.nn.Parameter(moderate(n, n, HALF)) for n in (70, 5)]
        inside = kinds["adam"](params, lr=0.1) if hooked else torch.optim.SGD(params, lr=0.1)
        told: list[str] = []
        if hooked:
            inside.register_step_pre_hook(lambda *_, told=told: told.append("step"))
        optimizer = kinds["wrapper"](inside, static_loss_scale=8.0, clip_grad=0.1, verbose=False)
        for seed, bad in enumerate((None, math.inf, None)):
            for slot, param in enumerate(params):
                param.grad = moderate(param.numel(), 10 * seed + slot, HALF)
            if bad is not None and params[0].grad is not None:
                params[0].grad[3] = bad
            optimizer.step()
        assert told == (["step", "step"] if hooked else [])
        results.append([param.detach() for param in params])
    for ours, theirs in zip(*results, strict=True):
        assert bool(same(ours, theirs).all())


@pytest.mark.parametrize("source", SIDES)
@pytest.mark.parametrize("inside", ["adam", "lamb"])
@pytest.mark.parametrize("states", [True, False])
def test_checkpoints_are_interchangeable(source: str, inside: str, states: bool) -> None:
    saved = Training(source, HALF, inside)
    for seed, bad in enumerate((math.inf, None, None)):
        saved.fill(seed, bad)
        saved.optimizer.step()
    file = io.BytesIO()
    torch.save(saved.optimizer.state_dict(), file)
    pair = [Training(side, HALF, inside) for side in SIDES]
    for one in pair:
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        one.optimizer.load_state_dict(loaded, load_optimizer_states=states)
        for seed in (7, 8):
            one.fill(seed)
            one.optimizer.step()
    check(pair[0], pair[1])


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    one = Training("fast", HALF)
    one.fill(1)
    one.optimizer.step()
    before, good = [t.clone() for t in one.seen()], one.optimizer.state_dict()
    short = [master[:-1] for master in good["fp32_groups_flat"]]
    for broken, sentence in (
        ({**good, "fp32_groups_flat": short}, r"fp32_groups_flat\[0\] has 369 elements"),
        ({**good, "fp32_groups_flat": short[:1]}, "fp32_groups_flat has 1 tensors"),
        ({**good, "clip_grad": "much"}, "clip_grad='much'"),
        ({**good, "cur_scale": -1.0}, "loss scale is -1.0"),
        ({**good, "optimizer_state_dict": {}}, "should be the state dict of an optimizer"),
        ({k: v for k, v in good.items() if k != "cur_iter"}, "state has no cur_iter"),
    ):
        with pytest.raises(ValueError, match=sentence):
            one.optimizer.load_state_dict(broken)
    for now, then in zip(one.seen(), before, strict=True):
        assert bool(same(now, then).all())


def test_an_overflow_at_the_floor_raises_when_something_is_read() -> None:
    params = [torch.nn.Parameter(moderate(7, 1, HALF))]
    scaler = twinstep.fast.scalers.DynamicLossScale(init_scale=1.0, delayed_shift=1)
    inside = twinstep.fast.fused_adam.FusedAdam(params)
    optimizer = twinstep.fast.fp16_optimizer.FP16Optimizer(
        inside, loss_scale_config=scaler, verbose=False
    )
    before = params[0].detach().clone()
    params[0].grad = torch.full((7,), math.inf, dtype=HALF)
    optimizer.step()
    with pytest.raises(MinimumLossScale, match=r"overflow at loss scale 1\.0, which should be"):
        assert optimizer.overflow
    assert optimizer.overflow
    assert bool(same(params[0].detach(), before).all())
    assert not optimizer.state


def one_group(inside: str, count: int = 2, size: int = 4096) -> Training:
    """Parameters of one group, without gaps that a warp could read across."""
    training = Training.__new__(Training)
    training.params = [torch.nn.Parameter(moderate(size, slot, HALF)) for slot in range(count)]
    kind = SIDES["fast"][inside](training.params, lr=0.01)
    training.optimizer = twinstep.fast.fp16_optimizer.FP16Optimizer(
        kind, dynamic_loss_scale=True, clip_grad=0.5, verbose=False
    )
    return training


@pytest.mark.parametrize(("inside", "count", "size"), [("adam", 3, 30), ("lamb", 5, 42)])
def test_launches_and_bytes_of_a_step_are_those_of_the_design(
    inside: str, count: int, size: int
) -> None:
    training = one_group(inside)
    training.fill(0)
    with twinstep.replay.launches() as log:
        training.optimizer.step()
    assert len(log) == count
    # Behind the pointer table: parameters and what is as large; the table itself is not.
    moved = sum(
        traffic.read + traffic.written
        for launch in log
        for name, traffic in launch.buffers.items()
        if name.startswith("table[")
    )
    assert moved == size * sum(param.numel() for param in training.params)


class Operators(TorchDispatchMode):
    """Operators of torch that touch a large tensor; views compute nothing."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.large: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        """Note the operator if one of its tensors is large."""
        result = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1]
        tensors = [x for x in (*args, result) if isinstance(x, Tensor)]
        views = ("detach", "split", "split_with_sizes", "slice", "view", "alias", "_unsafe_view")
        if name not in views and any(tensor.numel() >= self.least for tensor in tensors):
            self.large.append(name)
        return result


def on_the_device(training: Training) -> list[Tensor]:
    """What would lie in a GPU's memory: the control block, state, weights, gradients."""
    optimizer = training.optimizer
    inside = [t for state in optimizer.state.values() for t in state.values()]
    grads = [param.grad for param in training.params]
    block = optimizer.loss_scaler.on(torch.device("cpu")).block
    return [block, *optimizer.fp32_groups_flat, *optimizer.fp16_groups_flat, *inside, *grads]


@pytest.mark.parametrize("inside", ["adam", "lamb"])
def test_backward_and_step_neither_compute_in_torch_nor_wait(inside: str) -> None:
    training = one_group(inside)
    for seed in range(3):
        training.fill(seed)
        loss = sum(param.float().sum() for param in training.params)
        with ExitStack() as stack:
            reads = [stack.enter_context(watched(t)) for t in on_the_device(training)]
            training.optimizer.backward(loss)
            with Operators(1000) as operators:
                training.optimizer.step()
        assert not any(reads)
        # State is made with the first step, as many zeros as there are parameters.
        assert seed == 0 or operators.large == []


def test_the_watch_notices_a_read_and_an_operator() -> None:
    training = one_group("adam")
    training.fill(0)
    training.optimizer.step()
    block = training.optimizer.loss_scaler.on(torch.device("cpu")).block
    with watched(block) as reads, Operators(1000) as operators:
        assert not training.optimizer.overflow
        training.params[0].detach().mul_(2.0)
    assert reads
    assert operators.large == ["mul_"]


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Collect the names of kernels that are compiled inside."""
    names: list[str] = []
    knobs = triton.knobs.compilation
    before = knobs.listener
    knobs.listener = lambda *, metadata, **_: names.append(metadata["name"])
    try:
        yield names
    finally:
        knobs.listener = before


@pytest.mark.parametrize("inside", ["adam", "lamb"])
def test_a_second_step_compiles_nothing_and_uploads_no_table_again(inside: str) -> None:
    training = Training("fast", HALF, inside)
    training.fill(0)
    grads = [param.grad for param in training.params]
    training.optimizer.step()
    built = training.optimizer._step.cache.built
    for param, grad in zip(training.params, grads, strict=True):
        param.grad = grad
    with compilations() as names:
        training.optimizer.step()
    assert names == []
    assert training.optimizer._step.cache.built == built


def test_a_closure_is_refused_in_the_words_of_the_reference() -> None:
    sentences = []
    for side in SIDES:
        with pytest.raises(RuntimeError) as caught:
            Training(side, HALF).optimizer.step(lambda: 0.0)
        sentences.append(str(caught.value))
    assert sentences[0] == sentences[1]


Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"fused_adam_legacy": True}, "fused_adam_legacy=True, but should be False"),
        ({"norm_type": 0.0}, "norm_type=0.0, but should be positive"),
    ],
)
def test_what_is_not_done_here_is_refused(option: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=sentence):
        Training("fast", HALF, **option)


def test_used_optimizers_are_refused() -> None:
    param = torch.nn.Parameter(moderate(3, 1, HALF))
    used = twinstep.fast.fused_adam.FusedAdam([param])
    used.initialize_states()
    with pytest.raises(ValueError, match="init_optimizer has state of 1 parameters"):
        twinstep.fast.fp16_optimizer.FP16Optimizer(used)
