"""Messages of every class per step are those of the table, on both sides, call by call."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.helpers.mesh import Experts, Mesh, Training, engine, experts, on_mesh
from tests.helpers.partitions import built
from tests.helpers.sides import CLASSES, PLAIN, SIDES
from tests.helpers.zero_built import SIDE, fill
from tests.helpers.zero_built import built as zero_built
from twinstep.parity.report.traffic_messages import STEPS, Message, messages_table

pytestmark = pytest.mark.usefixtures("replay")

# torch 2.13 has renamed these.
SINGLE = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
}
Call = tuple[str, str, int | None]


def unreduced(mesh: Mesh) -> dict[str, Any]:
    return {"mpu": mesh, **engine(mesh, False)}


def with_experts(mesh: Mesh) -> dict[str, Any]:
    return {"mpu": mesh, **experts(mesh)}


# What the table names, as arguments; a row leads to "experts" where these are over it.
GIVEN: dict[str, tuple[type[Training], Any, dict[str, Any]]] = {
    "no groups": (Training, lambda _: {}, {}),
    "mpu": (Training, lambda mesh: {"mpu": mesh}, {}),
    "mpu, norm_type=inf": (Training, lambda mesh: {"mpu": mesh}, {"norm_type": math.inf}),
    "mpu, norm_type=3": (Training, lambda mesh: {"mpu": mesh}, {"norm_type": 3.0}),
    "mpu, an engine that does not reduce": (Training, unreduced, {}),
    "mpu, experts of one name": (Experts, with_experts, {}),
}


def counted(mesh: Mesh, step: Callable[[], object]) -> list[Call]:
    """Collectives of this rank in a step, each over a row or a column.

    The bytes of a pickled object, which come after their number, depend on values: None.
    """
    mesh.calls.clear()
    step()
    # A row lies along the axis of columns.
    places = {"column": "row", "row": "column"}
    found = [(SINGLE.get(c.collective, c.collective), places[c.group], c.bytes) for c in mesh.calls]
    pickled = [call.dtype is torch.uint8 for call in mesh.calls]
    return [(n, at, None if p else size) for (n, at, size), p in zip(found, pickled, strict=True)]


def wanted(messages: tuple[Message, ...], partitions: tuple[int, ...] = ()) -> list[Call]:
    """The same of the table: models and experts are over rows, data and copies over columns."""
    places = {"model": "row", "experts": "row", "data": "column", "copies": "column"}
    found: list[Call] = []
    for message in messages:
        name, sizes = message.collective, [message.size]
        if name == "all_gather_object":
            name, sizes = "all_gather", [8, None]
        elif message.each:
            of_each = 2 if message.each == "group" else 1  # two ranks
            sizes = [(message.size or 0) * of_each * numel for numel in partitions]
        found += [(name, places[message.over], size) for size in sizes]
    return found


@pytest.mark.parametrize("side", SIDES)
def test_fp16_classes_send_what_the_table_lists(side: str) -> None:
    rows = [(kind, row) for row in STEPS for kind in row.classes if kind.startswith("FP16")]
    assert {row.given for _, row in rows} == set(GIVEN)
    for kind, row in rows:
        cls, given, options = GIVEN[row.given]

        def run(mesh: Mesh, kind: str = kind, made: Any = (cls, given, options)) -> list[Call]:
            # Around an optimizer of torch's the host waits, and sends the same.
            inside = "SGD" if kind == "FP16UnfusedOptimizer" else "FusedAdam"
            training = made[0](side, mesh, kind=kind, inside=inside, given=made[1], **made[2])
            training.fill(0)
            return counted(mesh, training.optimizer.step)

        ranks = on_mesh(1, 2, run)
        assert ranks == [wanted(getattr(row, side))] * 2, (kind, row.given)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("grouped", [True, False])
def test_bf16_sends_what_the_table_lists(side: str, grouped: bool) -> None:
    given = "dp_process_group, mpu" if grouped else "no groups"
    (row,) = [row for row in STEPS if "BF16Optimizer" in row.classes and row.given == given]

    def run(mesh: Mesh) -> list[list[Call]]:
        groups = {"dp_process_group": mesh.column, "mpu": mesh} if grouped else {}
        params, optimizer = built(side, **groups)
        found = []
        for value in (1.0, math.inf):
            for param in params:
                param.grad = torch.full_like(param, value)
            optimizer.update_hp_grads()
            found.append(counted(mesh, optimizer.step))
            assert optimizer.overflow is math.isinf(value)
        return found

    # 4 and 3 + 5 elements over two ranks.
    taken = wanted(getattr(row, side), (2, 4))
    sums = "all_gather_object"
    skipped = wanted(tuple(m for m in getattr(row, side) if m.collective != sums), (2, 4))
    size = 2 if grouped else 1  # of several, all would split masters
    assert on_mesh(size, size, run) == [[taken, skipped]] * size**2


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("stage2", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
def test_zero_sends_what_the_table_lists(side: str, grouped: bool, stage2: bool) -> None:
    (row,) = [
        row
        for row in STEPS
        if "ZeroOptimizer" in row.classes and (row.given != "no groups") is grouped
    ]

    def run(mesh: Mesh) -> list[Call]:
        token = SIDE.set(side)
        group = mesh.column if grouped else None
        params, optimizer = zero_built(group, dtype=torch.bfloat16, partition_grads=stage2)
        fill(params, 1.0)
        calls = counted(mesh, optimizer.step)
        SIDE.reset(token)
        return calls

    # 12 elements over two ranks.
    size = 2 if grouped else 1
    assert on_mesh(size, 1, run) == [wanted(getattr(row, side), (6,))] * size


@pytest.mark.parametrize("side", SIDES)
def test_plain_optimizers_send_nothing(side: str) -> None:
    (row,) = [row for row in STEPS if set(PLAIN) <= set(row.classes)]
    assert row.fast == row.reference == ()

    def run(mesh: Mesh) -> int:
        for name in PLAIN:
            param = torch.nn.Parameter(torch.ones(3))
            param.grad = torch.ones(3)
            CLASSES[side][name]([param]).step()
        return len(mesh.calls)

    assert on_mesh(1, 2, run) == [0, 0]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_no_message_brings_more_together_than_the_bucket(side: str, world: int) -> None:
    """As few messages as the bucket allows, of all ranks' elements together."""
    sizes, width = (41, 6, 0), torch.bfloat16.itemsize

    def run(mesh: Mesh, bucket: int) -> list[list[int]]:
        params, optimizer = built(
            side, sizes, dp_process_group=mesh.column, allgather_bucket_size=bucket
        )
        before = [param.detach() + 1.0 for param in params]
        for master in optimizer.fp32_groups_flat_partition:
            master.detach().add_(1.0)
        calls = counted(mesh, optimizer.update_lp_params)
        assert all(map(torch.equal, before, params))
        partitions = [master.numel() for master in optimizer.fp32_groups_flat_partition]
        lengths = [(size or 0) // width for _, _, size in calls]
        return [partitions, lengths]

    for bucket in (1, world - 1, world, 3 * world + 1, 12, 47, 5_000_000_000):
        (partitions, lengths), *others = on_mesh(world, 1, partial(run, bucket=bucket))
        assert others == [[partitions, lengths]] * (world - 1)
        each = max(bucket // world, 1)
        assert max(lengths) * world <= max(bucket, world), bucket
        assert len(lengths) == sum(-(-numel // each) for numel in partitions), bucket
        assert sum(lengths) == sum(partitions)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("bucket", [0, -4])
def test_a_bucket_that_holds_nothing_is_refused(side: str, bucket: int) -> None:
    with pytest.raises(ValueError, match=f"bucket_size={bucket}, but should be positive"):
        built(side, allgather_bucket_size=bucket)


def test_the_table_names_every_class_of_both_sides() -> None:
    assert {name for row in STEPS for name in row.classes} == {
        name for name in CLASSES["fast"] if not name.endswith("Scale")
    }
    assert messages_table().row_count == len(STEPS)
