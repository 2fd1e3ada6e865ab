"""Offload of ZeRO: nothing but the place changes, on any option; see also `test_ranks_zero`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.ranks import on_ranks
from tests.helpers.zero_built import SIDE, Group, built, fill, seen
from twinstep.fast.kernels.cpu.accumulate import accumulate_
from twinstep.fast.optimizers import zero_offload, zero_report
from twinstep.fast.optimizers.fused_adam import FusedAdam
from twinstep.fast.optimizers.fused_lamb import FusedLamb
from twinstep.fast.optimizers.zero import ZeroOptimizer
from twinstep.fast.optimizers.zero_offload import Offload, enter_squares
from twinstep.parity.cases.fixed_inputs import moderate
from twinstep.replay import launches

pytestmark = pytest.mark.usefixtures("replay", "on_this_side")
OFFLOAD = SimpleNamespace(device="cpu", pin_memory=True)


@pytest.fixture
def on_this_side() -> Iterator[None]:
    token = SIDE.set("fast")
    yield
    SIDE.reset(token)


class Event:
    """An event of a device whose last copy arrives when it is waited for."""

    def record(self, stream: object) -> None:
        """Nothing to do."""

    def follows(self, place: Tensor) -> None:
        """Take back what has been copied to a place."""
        self.place, self.sent = place, place.clone()
        place.fill_(torch.nan)

    def synchronize(self) -> None:
        """Let it arrive."""
        self.place.copy_(self.sent)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is on a device whose memory is not that of the CPU, as far as offload knows."""
    construct, bring = Offload.__init__, Offload._bring

    def constructed(self: Offload, device: torch.device, *, pins: bool) -> None:
        construct(self, torch.device("cuda"), pins=False)

    def brought(self: Any, sums: Tensor | None, place: Tensor, received: Tensor) -> None:
        bring(self, sums, place, received)
        self._coming[-1][2].follows(place)

    monkeypatch.setattr(Offload, "__init__", constructed)
    monkeypatch.setattr(Offload, "_bring", brought)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)


def test_the_device_only_decides() -> None:
    """Neither sums, nor norm, nor update are launched; without offload they are."""

    def kernels(offload: object) -> set[str]:
        params, optimizer = built(None, inside="FusedAdam", offload_optimizer_config=offload)
        fill(params, 0.5)
        with launches() as log:
            optimizer.step()
        return {launch.kernel for launch in log}

    assert kernels(OFFLOAD) == {"finalise_kernel"}
    others = {"accumulate_flat_kernel", "reduce_flat_kernel", "adam_flat_kernel"}
    assert kernels(None) >= {"finalise_kernel", *others}


@pytest.mark.parametrize("inside", ["FusedAdam", "momentum"])
def test_a_run_goes_on_with_its_bits_with_offload_and_without(inside: str) -> None:
    def run(group: Group, turns: tuple[bool, bool]) -> list[Any]:
        found: list[Any] = []
        saved: Any = None
        for number, offload in enumerate(turns):
            config = OFFLOAD if offload else None
            params, optimizer = built(group, inside=inside, offload_optimizer_config=config)
            if saved is not None:
                optimizer.load_state_dict(saved, load_from_fp32_weights=True)
            for step in range(2):
                for slot, param in enumerate(params):
                    param.grad = moderate(
                        param.numel(), 100 * number + 10 * step + slot, torch.half
                    )
                if number == step == 1:
                    params[0].grad[1] = torch.inf  # type: ignore[index]
                optimizer.step()
            saved = [None] * 2
            torch.distributed.all_gather_object(saved, optimizer.state_dict(), group=group)
            found.append((seen(params, optimizer), optimizer.overflow))
        return found

    wanted = on_ranks(2, partial(run, turns=(False, False)))
    assert [overflow for _, overflow in wanted[0]] == [False, True]
    for turns in ((False, True), (True, False), (True, True)):
        assert on_ranks(2, partial(run, turns=turns)) == wanted


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="device is nvme, but should be none or cpu"):
        built(None, offload_optimizer_config=SimpleNamespace(device="nvme"))
    _, optimizer = built(None, offload_optimizer_config=SimpleNamespace(device="none"))
    assert isinstance(optimizer, ZeroOptimizer)
    assert optimizer._offload is None


def test_an_optimizer_that_would_launch_kernels_is_refused() -> None:
    says = "the inner optimizer is {}, but should be FusedAdam without hooks or one of torch"
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.half))
    given: dict[str, Any] = {"param_names": {param: "p"}, "offload_optimizer_config": OFFLOAD}
    with pytest.raises(RuntimeError, match=says.format("FusedLamb")):
        ZeroOptimizer(FusedLamb([param]), **given)
    inside = FusedAdam([param])
    optimizer = ZeroOptimizer(inside, **given)
    inside.register_step_post_hook(lambda *_: None)
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=says.format("FusedAdam")):
        optimizer.step()
    assert not optimizer.state


def trained(
    group: Group, offload: object, *, overlap_comm: bool, micros: int
) -> tuple[list[Any], int]:
    """All that can be seen of three steps on two groups, and the number of buffers of copies."""
    given: dict[str, Any] = {"inside": "FusedAdam", "split": 1, "dtype": torch.bfloat16}
    given |= {"reduce_bucket_size": 4, "overlap_comm": overlap_comm, "clip_grad": 0.5}
    params, optimizer = built(group, (4, 3, 5), offload_optimizer_config=offload, **given)
    found = []
    for step in range(3):
        for micro in range(micros):
            for slot, param in enumerate(params):
                param.grad = moderate(param.numel(), 10 * step + 4 * micro + slot, param.dtype)
            optimizer.reduce_gradients()
        optimizer.step()
        found.append(seen(params, optimizer))
    optimizer.refresh_fp32_params()
    optimizer.update_lp_params()
    whole: Any = optimizer
    buffers = 0 if offload is None else len(whole._offload.buffers())
    return [*found, seen(params, optimizer)], buffers


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("overlap_comm", [False, True])
@pytest.mark.parametrize(("micros", "buffers"), [(1, 0), (2, zero_offload.ROOMS)])
def test_a_device_apart_changes_no_bit(overlap_comm: bool, micros: int, buffers: int) -> None:
    run = partial(trained, overlap_comm=overlap_comm, micros=micros)
    offloaded, plain = (on_ranks(2, partial(run, offload=config)) for config in (OFFLOAD, None))
    assert [found for found, _ in offloaded] == [found for found, _ in plain]
    # Beside them what is held, and weights on their way, of two groups.
    assert [made for _, made in offloaded] == [buffers + 4] * 2


def not_sent_back(self: Offload, lists: Any, weights: Tensor, *given: Any, **named: Any) -> None:
    """G08: weights stay where they were updated."""
    before = weights.clone()
    UPDATE(self, lists, weights, *given, **named)
    weights.copy_(before)


def one_room(self: Offload, key: object, numel: int, dtype: torch.dtype) -> Tensor:
    """G34: groups share a buffer."""
    return ROOM(self, "all", numel, dtype)


def not_awaited(self: Any) -> None:
    """G23: what is on its way is read."""
    sums, place, _ = self._coming.popleft()
    if sums is not None:
        accumulate_([sums], [place])


def norm_elsewhere(counted: Any, uncounted: Any, limbs: Tensor) -> None:
    """E16: the norm is formed of limbs on another device than those that decide."""
    enter_squares(counted, uncounted, limbs.clone())


UPDATE, ROOM = Offload.update, Offload._room


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(
    ("home", "name", "wrong"),
    [
        (Offload, "update", not_sent_back),
        (Offload, "_room", one_room),
        (Offload, "_take_first", not_awaited),
        (zero_report, "enter_squares", norm_elsewhere),
    ],
    ids=["not sent back", "one room", "not awaited", "norm elsewhere"],
)
def test_a_mistake_about_copies_is_noticed(
    home: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E16, G08, G23 and G34 of docs/reference/bugs.md."""
    run = partial(trained, overlap_comm=False, micros=2)
    right = on_ranks(2, partial(run, offload=OFFLOAD))
    monkeypatch.setattr(home, name, wrong)
    assert on_ranks(2, partial(run, offload=OFFLOAD)) != right


@pytest.mark.usefixtures("apart")
def test_buckets_from_a_device_are_all_added_in_two_buffers() -> None:
    offload = Offload(torch.device("cuda"), pins=False)
    sums = torch.zeros(40)
    sizes, first = [9, 1, 12, 3, 15], 0
    offload.end_round()
    for size in sizes:
        piece = torch.full((size,), float(size), dtype=torch.bfloat16)
        offload.add(sums, first, piece)
        assert len(offload.buffers()) <= zero_offload.ROOMS
        piece.zero_()
        first += size
    offload.settle()
    assert sums.tolist() == [float(size) for size in sizes for _ in range(size)]
    assert len(offload.buffers()) == zero_offload.ROOMS


@pytest.mark.parametrize("sums", [torch.float32, torch.bfloat16])
def test_gradients_are_held_until_there_are_more_or_they_are_read(sums: torch.dtype) -> None:
    """Held gradients are sums that began at zero: a -0.0 among them changes no bit."""
    given: dict[str, Any] = {"gradient_accumulation_dtype": sums, "inside": "FusedAdam"}
    params, optimizer = built(None, (3,), offload_optimizer_config=OFFLOAD, **given)
    whole: Any = optimizer
    (group,) = whole.groups
    minus = torch.tensor([-0.0, 1.0, -2.0], dtype=torch.half)
    exact = sums is torch.float32
    for reads in (False, True):
        optimizer.initialize_optimizer_states()
        state = optimizer.state[group.master]
        state["exp_avg"].fill_(-0.0)
        params[0].grad = minus.clone()
        optimizer.reduce_gradients()
        assert (whole._offload.gradients(group.reduced) is not group.reduced) == exact
        assert group.reduced.any() != exact
        if reads:
            assert optimizer.get_full_hp_grad("p0").tolist() == [0.0, 1.0, -2.0]
            assert whole._offload.gradients(group.reduced) is group.reduced
        optimizer.step()
        assert not group.reduced.any()
        assert optimizer.get_full_hp_grad("p0").tolist() == [0.0] * 3
        assert not state["exp_avg"][0].signbit()
