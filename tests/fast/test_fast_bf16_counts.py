"""What a step of the fast BF16Optimizer costs: launches, bytes, operators, compilations."""

import math
from functools import partial

import pytest
import torch

import twinstep.replay
from tests.helpers.battery import Twins as AnyTwins
from tests.helpers.costs import Operators, compilations

pytestmark = pytest.mark.usefixtures("replay")

BRAIN, FP32 = torch.bfloat16, torch.float32
Twins = partial(AnyTwins, "BF16Optimizer")
N = 8192  # whole tiles: every buffer moves its own bytes and no more


def moved(clip: float, accumulation: torch.dtype) -> dict[str, float]:
    """Launches of one step, with bytes per parameter of buffers of parameter size."""
    twins = Twins([[(N,)]], clip_grad=clip, grad_acc_dtype=accumulation)
    twins.fast.backward(twins.params[0][0].float().sum())
    with twinstep.replay.launches() as log:
        twins.fast.step()
    found = {}
    for one in log:
        traffic = [each.read + each.written for each in one.buffers.values()]
        found[one.kernel] = sum(size for size in traffic if size >= N) / N
        assert not one.approximations
    assert len(found) == len(log)
    return found


@pytest.mark.parametrize(
    ("clip", "accumulation", "design"),
    [
        (0.0, BRAIN, {"reduce": 2, "update": 28}),
        # Clipping rounds to the accumulators' dtype: read and written once more.
        (0.5, BRAIN, {"reduce": 2, "clip": 4, "update": 28}),
        # Gradients are read as stored, here in 32 bits: 2 more in each of both passes.
        (0.0, FP32, {"reduce": 4, "update": 30}),
        (0.5, FP32, {"reduce": 4, "update": 30}),
    ],
)
def test_a_step_moves_the_bytes_of_its_design(
    clip: float, accumulation: torch.dtype, design: dict[str, float]
) -> None:
    """One read of the gradients for the norm, which decides whether the step is skipped, too."""
    names = {
        "reduce": "reduce_flat_kernel",
        "clip": "unscale_flat_kernel",
        "update": "adam_flat_kernel",
    }
    wanted = {names[phase]: float(size) for phase, size in design.items()}
    assert moved(clip, accumulation) == {**wanted, "finalise_unscaled_kernel": 0.0}


@pytest.mark.parametrize(("accumulation", "size"), [(BRAIN, 6.0), (FP32, 10.0)])
def test_accumulation_reads_both_and_writes_one(accumulation: torch.dtype, size: float) -> None:
    twins = Twins([[(N,)]], grad_acc_dtype=accumulation)
    with twinstep.replay.launches() as log:
        twins.fast.backward(twins.params[0][0].float().sum())
    (one,) = log
    assert one.bytes_read + one.bytes_written == size * N


@pytest.mark.parametrize("kind", [1.0, math.inf])
def test_other_norms_read_the_gradients_once_and_approximate_nothing(kind: float) -> None:
    twins = Twins([[(16384,)]], norm_type=kind, grad_acc_dtype=BRAIN)
    twins.backward(0)
    with twinstep.replay.launches() as log:
        twins.fast.step()
    first = log[0]
    assert first.kernel == "reduce_flat_kernel"
    largest = max(traffic.read for traffic in first.buffers.values())
    assert largest == 2 * 16384
    assert not any(one.approximations for one in log)


def test_groups_take_two_launches_each_and_one_to_reduce() -> None:
    twins = Twins([[(N,)], [(5,), (7,)], [(300,)]])
    twins.backward(0)
    with twinstep.replay.launches() as log:
        twins.fast.step()
    assert len(log) == 1 + 2 * 3


@pytest.mark.parametrize("immediate", [False, True])
@pytest.mark.parametrize("shapes", [[[(N,)]], [[(N,), (5,)], [(2 * N,)]]], ids=["flat", "groups"])
def test_a_step_does_no_arithmetic_in_torch_and_the_host_does_not_wait(
    shapes: list[list[tuple[int, ...]]], immediate: bool
) -> None:
    """Only clearing the accumulators is torch's; what autograd does in backward is not counted."""
    twins = Twins(shapes, clip_grad=0.5, grad_acc_dtype=BRAIN, immediate_grad_update=immediate)
    # Pointer tables and changed hyper-parameters go to the device first; then nothing does.
    for _ in range(3):
        twins.backward(0)
        with Operators(N) as seen:
            twins.fast.update_hp_grads()
            twins.fast.step()
    assert seen.waits == []
    assert set(seen.large) == {"zero_"}


def test_the_count_of_operators_notices_one_and_a_wait() -> None:
    with Operators(N) as seen:
        torch.zeros(N).mul_(2.0)[0].item()
    assert "mul_" in seen.large
    assert seen.waits != []


@pytest.mark.parametrize("accumulation", [BRAIN, FP32])
def test_a_second_step_compiles_and_uploads_nothing(accumulation: torch.dtype) -> None:
    twins = Twins([[(700,), (5,)], [(N,)]], clip_grad=0.5, grad_acc_dtype=accumulation)
    twins.backward(0)
    twins.step()
    built = twins.fast._step.cache.built
    twins.fast.set_lr(0.123)
    with compilations() as names:
        twins.backward(1)
        twins.fast.step()
    assert names == []
    assert twins.fast._step.cache.built == built


def test_another_length_compiles_nothing() -> None:
    for seed, size in enumerate((N, 1, 16, 2048, 4097)):
        twins = Twins([[(size,)]], clip_grad=0.5)
        with compilations() as names:
            twins.backward(seed)
            twins.fast.step()
        assert names == [] or seed == 0


@pytest.mark.gpu
def test_a_captured_step_replays_like_an_eager_one() -> None:
    """Not yet measured: no GPU was there when this was written."""
    from twinstep.fast.optimizers.bf16 import BF16Optimizer
    from twinstep.fast.optimizers.fused_adam import FusedAdam

    def build() -> tuple[torch.nn.Parameter, BF16Optimizer]:
        param = torch.nn.Parameter(torch.arange(5000.0).to(BRAIN).cuda())
        return param, BF16Optimizer(FusedAdam([param]), param_names={param: "p"}, clip_grad=1.0)

    def fill(param: torch.nn.Parameter, optimizer: BF16Optimizer) -> None:
        param.grad = torch.ones_like(param)
        optimizer.update_hp_grads()

    (eager, one), (captured, other) = build(), build()
    for _ in range(3):
        fill(eager, one)
        one.step()
    fill(captured, other)
    other.step()
    graph = torch.cuda.CUDAGraph()
    fill(captured, other)
    with torch.cuda.graph(graph):
        other.step()
    for _ in range(2):
        fill(captured, other)
        graph.replay()
    assert torch.equal(eager, captured)
