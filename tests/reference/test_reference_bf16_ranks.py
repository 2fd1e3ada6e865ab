"""BF16Optimizer over ranks: partitions, fragments, and checkpoints that change the world size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers.partitions import trained
from tests.helpers.ranks import on_ranks
from twinstep.contract.compat import Compat
from twinstep.contract.fragments import FragmentAddress
from twinstep.contract.moments import StateDict
from twinstep.parity.cases.fixed_inputs import bits, moderate
from twinstep.reference.optimizers.bf16 import BF16Optimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam

BRAIN = torch.bfloat16
MASTERS, INNER = "single_partition_of_fp32_groups", "base_optimizer_state"
SIZES = (4, 0, 3, 5)


def built(
    group: dist.ProcessGroup | None, sizes: tuple[int, ...] = SIZES, **options: object
) -> tuple[list[nn.Parameter], BF16Optimizer]:
    params = [nn.Parameter(moderate(size, size + 1, BRAIN)) for size in sizes]
    names = {p: f"p{place}" for place, p in enumerate(params)}
    make: Callable[..., BF16Optimizer] = BF16Optimizer
    inside = FusedAdam(params, lr=0.02, weight_decay=0.1)
    return params, make(inside, param_names=names, dp_process_group=group, **options)


def test_partitions_and_fragments_are_those_of_the_layout() -> None:
    """Sizes 4, 3, 5 over two ranks; no fragment for what is empty."""
    mappings = on_ranks(2, lambda group: built(group)[1].param_slice_mappings[0])
    assert mappings == [
        {"p0": FragmentAddress(4, 0), "p2": FragmentAddress(2, 4)},
        {"p2": FragmentAddress(1, 0), "p3": FragmentAddress(5, 1)},
    ]


def test_every_rank_records_its_own_padding() -> None:
    """Edge BF-7: one element over four ranks is padded to eight."""
    states = on_ranks(4, lambda group: built(group, (1,))[1].state_dict())
    assert [state["group_paddings"] for state in states] == [[1], [2], [2], [2]]


def test_each_group_has_its_own_ranks() -> None:
    """Edge BF-4: masters of a split and of an unsplit group come from their own partitions."""

    def run(group: dist.ProcessGroup | None) -> list[list[float]]:
        shared = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=BRAIN))
        expert = nn.Parameter(torch.tensor([5.0, 6.0], dtype=BRAIN))
        expert.allreduce = False  # type: ignore[attr-defined]
        inside = FusedAdam([shared])
        inside.add_param_group({"params": [expert], "moe": True, "name": "e"})
        make: Callable[..., BF16Optimizer] = BF16Optimizer
        optimizer = make(
            inside, param_names={shared: "s", expert: "e"}, dp_process_group=group,
            has_moe_layers=True,
        )  # fmt: skip
        optimizer.refresh_fp32_params()
        return [master.tolist() for master in optimizer.fp32_groups_flat_partition]

    assert on_ranks(2, run) == [[[1.0, 2.0], [5.0, 6.0]], [[3.0, 4.0], [5.0, 6.0]]]


def test_a_whole_gradient_is_the_accumulated_one_on_every_rank() -> None:
    """Edges BF-8 and TF-5: found by name, and summed by nobody."""

    def run(group: dist.ProcessGroup | None) -> list[list[float]]:
        params, optimizer = built(group, (4, 6))
        for param in params:
            param.grad = torch.full_like(param, 2.0)
        optimizer.update_hp_grads()
        optimizer.get_full_hp_grad("p0").zero_()  # a copy
        return [optimizer.get_full_hp_grad(f"p{place}").tolist() for place in range(2)]

    assert on_ranks(2, run) == [[[2.0] * 4, [2.0] * 6]] * 2


def test_a_missing_state_is_an_error_on_every_rank() -> None:
    """Edge TF-6: nobody is left waiting."""

    def run(group: dist.ProcessGroup | None) -> str:
        _, optimizer = built(group, (4,))
        try:
            optimizer.get_full_hp_param("p0", "exp_avg")
        except ValueError as error:
            return str(error)
        return ""

    said = on_ranks(2, run)
    assert said == ["p0 has no state exp_avg, but has none before a first step"] * 2


def saved_by(world: int, steps: int, sizes: tuple[int, ...] = SIZES) -> list[StateDict]:
    def run(group: dist.ProcessGroup | None) -> StateDict:
        params, optimizer = built(group, sizes)
        trained(params, optimizer, range(steps))
        return optimizer.state_dict()

    return on_ranks(world, run)


def seen(params: list[nn.Parameter], optimizer: BF16Optimizer) -> list[list[int]]:
    whole = [
        optimizer.get_full_hp_param(name, key)
        for name in ("p0", "p2", "p3")
        for key in (None, "exp_avg", "exp_avg_sq")
    ]
    return [bits(tensor.detach()) for tensor in (*params, *whole)]


@pytest.mark.parametrize("keeps", [False, True])
def test_without_saved_masters_they_come_from_the_model_weights(keeps: bool) -> None:
    """Edge BF-5; upstream keeps what construction made of them."""
    entries = saved_by(1, 2)
    params, optimizer = built(None, compat=Compat(keep_masters_on_load=keeps))
    old = optimizer.fp32_groups_flat_partition[0].detach().clone()
    with torch.no_grad():
        for param in params:
            param.fill_(5.0)
    optimizer.load_state_dict(entries)
    new = optimizer.fp32_groups_flat_partition[0].detach()
    assert bits(new) == bits(old if keeps else torch.full((12,), 5.0))


def test_entries_of_ranks_that_are_not_needed_may_be_missing() -> None:
    entries: list[StateDict | None] = [*saved_by(2, 1)]
    missing = [[entries[0], None], [None, entries[1]]]

    def run(group: dist.ProcessGroup | None) -> int:
        params, optimizer = built(group)
        own = missing[group.rank()] if group is not None else entries
        optimizer.load_state_dict(own, load_from_fp32_weights=True)  # type: ignore[arg-type]
        trained(params, optimizer, range(1))
        return 1

    assert on_ranks(2, run) == [1, 1]


def test_a_short_partition_is_extended_and_a_long_one_is_refused() -> None:
    """Edge CK-12."""
    (entry,) = saved_by(1, 0, (3,))
    _, optimizer = built(None, (3,))
    master = torch.tensor([1.0, 2.0, 3.0])
    optimizer.load_state_dict(
        [{**entry, "single_partition_of_fp32_groups": [master]}], load_from_fp32_weights=True
    )
    assert optimizer.fp32_groups_flat_partition[0].tolist() == [1.0, 2.0, 3.0, 0.0]
    long = {**entry, "single_partition_of_fp32_groups": [torch.zeros(6)]}
    with pytest.raises(ValueError, match="has 6 elements, but should have 4"):
        optimizer.load_state_dict([long])


def first_master(entry: StateDict) -> Tensor:
    masters = entry[MASTERS]
    assert isinstance(masters, list)
    found: Tensor = masters[0]
    return found


WRONG: dict[str, tuple[Callable[[StateDict], object], str]] = {
    "no list": (lambda e: "entries", "states should be a list with one entry per rank"),
    "nothing": (lambda e: [], "states should be a list with one entry per rank"),
    "no dict": (lambda e: [None], "state is a NoneType, but should be a dict"),
    "no version": (lambda e: [{**e, "ds_version": ""}], "ds_version is empty"),
    "foreign": (lambda e: [{"ds_version": "1"}], "state has no base_optimizer_state"),
    "groups": (
        lambda e: [{**e, "single_partition_of_fp32_groups": []}],
        "has 0 tensors, but should have 1",
    ),
    "too many": (lambda e: [e, e], r"partition_count=\[1\], but should be \[2\]"),
    "half of one": (
        lambda e: [
            {**e, "partition_count": [2]},
            {**e, "partition_count": [2], "partition_rank": [1], INNER: 1},
        ],
        "should be the state dict",
    ),
    "zero": (lambda e: [{**e, "zero_stage": 1}], "state has a zero_stage, but only a ZeRO opti"),
    "cut": (lambda e: [{**e, MASTERS: [first_master(e)[:-3]]}], "elements, but should have"),
    "half": (lambda e: [{**e, MASTERS: [first_master(e).half()]}], "is torch.float16, but should"),
    "moved": (
        lambda e: [{**e, "param_slice_mappings": [{"p0": {"numel": 1, "start": 7}}]}],
        "p0 lies at {'numel': 1, 'start': 7}, but should lie at",
    ),
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_what_does_not_fit_is_said_in_one_sentence_and_changes_nothing(wrong: str) -> None:
    make, message = WRONG[wrong]
    (entry,) = saved_by(1, 2)
    params, optimizer = built(None)
    trained(params, optimizer, range(1))
    before = seen(params, optimizer)
    with pytest.raises(ValueError, match=message) as caught:
        optimizer.load_state_dict(make(entry), load_from_fp32_weights=True)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert seen(params, optimizer) == before


def test_keys_are_those_of_deepspeed() -> None:
    """Edge BF-16: there is no zero_stage; `partition_rank` is ours."""
    (entry,) = saved_by(1, 0)
    assert sorted(entry) == [
        "base_optimizer_state", "clip_grad", "ds_version", "group_paddings", "param_slice_mappings",
        "partition_count", "partition_rank", "single_partition_of_fp32_groups",
    ]  # fmt: skip
