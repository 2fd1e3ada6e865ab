"""Every kernel of ours moves the bytes that its design allows, each parameter's exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.command import parity
from twinstep.parity.operations.table import operation_named
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import Kernel, kernels
from twinstep.parity.report.traffic import as_json, off_design, over_rest
from twinstep.parity.report.traffic_count import PIECES, Count, counted, large_call
from twinstep.parity.report.traffic_design import DESIGN, REST, REST_AT, total

Capture = pytest.CaptureFixture[str]
register_house()
CALLS = [
    (kernel, dtype, layout)
    for kernel in kernels()
    if kernel.name.startswith(("triton.", "cuda.")) and kernel.operation.lists
    for dtype in kernel.dtypes
    for layout in kernel.layouts
]
IDS = [f"{kernel.operation.name} {dtype} {layout}" for kernel, dtype, layout in CALLS]
# A span of the reduction's table for each piece, and a tail behind whole tiles.
UNIT = 16384 * PIECES
TAIL = 48 * PIECES


def count(operation: str, dtype: str, layout: str, parameters: int) -> list[Count]:
    kernel = next(kernel for kernel in kernels() if kernel.name == f"triton.{operation}")
    return counted(kernel, dtype, layout, parameters)


def rest(counts: list[Count]) -> int:
    return sum(one.rest for one in counts)


def at_a_million(small: list[Count], large: list[Count]) -> float:
    """Other bytes per parameter at `REST_AT`, from counts at two sizes.

    What a call moves besides parameters is affine in their number as long as the tail stays the
    same: so much for each launch, so much for each chunk.
    """
    step = large[0].parameters - small[0].parameters
    slope = (rest(large) - rest(small)) / step
    return (rest(small) + slope * (REST_AT - small[0].parameters)) / REST_AT


@pytest.mark.parametrize(("kernel", "dtype", "layout"), CALLS, ids=IDS)
def test_every_parameter_moves_as_designed_and_the_rest_is_little(
    kernel: Kernel, dtype: str, layout: str
) -> None:
    small = counted(kernel, dtype, layout, UNIT + TAIL)
    assert kernel.operation.name in DESIGN
    assert sum(map(len, (one.design for one in small))) > 0
    assert off_design(small) == []
    # The share of what each launch costs falls with the size: little here is less at a million.
    if rest(small) > REST * (UNIT + TAIL):
        large = counted(kernel, dtype, layout, 2 * UNIT + TAIL)
        assert at_a_million(small, large) <= REST


@pytest.mark.parametrize(
    ("operation", "dtype", "size"),
    [
        ("adamw_step", "bf16", 28),
        ("adamw_step", "fp16", 28),
        ("adamw_step", "fp32", 28),
        ("adamw_step", "bf16-pure", 22),
        ("adamw_step", "fp32-to-bf16", 30),
        ("adam_step", "bf16", 28),
        ("sgd_step", "fp16", 20),
        ("global_norm", "bf16", 2),
        ("global_norm", "fp32", 4),
        ("mixed_step", "fp16", 30),
        ("mixed_step", "bf16", 30),
        ("unscale", "fp16", 4),
        ("accumulate", "bf16", 10),
        ("cast_copy", "fp16", 6),
        ("flatten", "bf16", 4),
        ("unflatten", "fp32", 8),
    ],
)
def test_the_table_of_tensors_gives_the_designs_numbers(
    operation: str, dtype: str, size: int
) -> None:
    call = large_call(operation_named(operation, "here"), dtype, "flat", 4096)
    assert total(operation, call.lists) == size * 4096


def test_other_bytes_are_affine_in_the_parameters() -> None:
    sizes = [UNIT + TAIL, 2 * UNIT + TAIL, 5 * UNIT + TAIL]
    one, two, five = (rest(count("adamw_step", "bf16", "list", size)) for size in sizes)
    assert five - one == 4 * (two - one)


def test_a_gpus_many_programs_add_little_to_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    import twinstep.fast.kernels.reduce

    # For each of the 132 multiprocessors of an H200; on the CPU there are 8 in all.
    monkeypatch.setattr(
        twinstep.fast.kernels.reduce,
        "resident_programs",
        lambda device, chunks, each: min(chunks, each * 132),
    )
    counts = count("global_norm", "bf16", "flat", 4 * REST_AT + 2 * TAIL)
    assert next(one for one in counts if one.launch == "reduce_flat_kernel").grid == 257
    assert off_design(counts) == []
    assert over_rest(counts) == []


def test_a_byte_too_many_is_named() -> None:
    counts = count("cast_copy", "bf16", "flat", 4096)
    assert off_design(counts) == []
    buffers = {**counts[0].buffers, "sources": (4 * 4096, 4)}
    assert off_design([replace(counts[0], buffers=buffers)]) == [
        "triton.cast_copy bf16 flat cast_flat_kernel: sources moved 16384 + 4 bytes "
        "(read + written), but should move 16384 + 0"
    ]
    assert off_design([replace(counts[0], design={})])
    buffers = {**counts[0].buffers, "table": (int(REST * REST_AT) + 1, 0)}
    large = replace(counts[0], buffers=buffers, parameters=REST_AT)
    assert "0.1500 bytes per parameter besides" in over_rest([large])[0]
    assert over_rest([replace(large, parameters=REST_AT - 1)]) == []


def test_a_mixed_list_shares_its_design_between_launches() -> None:
    counts = [c for c in count("mixed_step", "mixed", "list", 4800) if c.launch[:6] == "reduce"]
    assert len(counts) == 3
    assert off_design(counts) == []
    assert off_design(counts[:2])


def test_folding_changes_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = count("adamw_step", "bf16", "flat", 100_000)
    monkeypatch.setattr("twinstep.parity.report.traffic_count.TILE", 8192)
    folded = count("adamw_step", "bf16", "flat", 100_000)
    assert [replace(one, seconds=0.0) for one in folded] == [
        replace(one, seconds=0.0) for one in whole
    ]


def resident() -> int:
    """Bytes of this process in memory, every page counted wherever it is mapped."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


def test_memory_does_not_grow_with_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    import twinstep.replay

    count("adamw_step", "bf16", "flat", 1 << 14)  # compiled and translated
    before, peaks = resident(), []
    forget = twinstep.replay.forget_pages

    def watch(*folded: torch.Tensor) -> None:
        peaks.append(resident())
        forget(*folded)

    monkeypatch.setattr("twinstep.replay.forget_pages", watch)
    counts = count("adamw_step", "bf16", "flat", 8 << 20)
    assert len(peaks) > 15
    assert sum(map(sum, counts[1].design.values())) == 28 * (8 << 20)
    # The tensors would take 18 bytes for each of the 8 Mi parameters; tiles take 18 MiB, twice
    # while they are made, and replay its batch.
    assert max(peaks) - before < 64 << 20 < (18 * 8) << 20


def test_the_command_prints_both_tables_and_json(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "a" / "t.json"
    arguments = ("--op", "cast_copy", "--dtype", "bf16", "--params", "5000", "--json", str(file))
    assert parity("traffic", *arguments) == 0
    out = capsys.readouterr().out
    assert "every byte as designed in 2 calls, 2 launches" in out
    assert "sources 4+0" in out
    assert "messages of one rank per step" in out
    rows = json.loads(file.read_text())["launches"]
    assert [row["layout"] for row in rows] == ["flat", "list"]
    assert rows[0]["buffers"]["copies"] == {"read": 0, "written": 10000, "parameter_sized": True}
    assert rows[0]["accesses"]["write 8"] == 4608 // 4


def test_json_on_standard_output_is_nothing_but_json(capsys: Capture) -> None:
    assert (
        parity("traffic", "--op", "cast_copy", "--dtype", "fp32", "--params", "1", "--json=-") == 0
    )
    assert len(json.loads(capsys.readouterr().out)["launches"]) == 2


@pytest.mark.parametrize(
    ("argv", "says", "code"),
    [
        (["--op", "lion"], '--op "lion" is unknown', 2),
        (["--kernel", "mine"], '--kernel "mine" is unknown', 2),
        (["--kernel", "native.adamw_step"], "native.adamw_step runs on cpu, but replay counts", 2),
        (["--dtype", "int4"], '--dtype "int4" is unknown', 2),
        (["--params", "0"], "params", 2),
        (["--params", "1e9"], "params", 2),
        (["--op", "clip_factor"], "nothing was counted", 3),
        (["--op", "cast_copy", "--params", str(10**15)], "cannot be mapped", 2),
    ],
)
def test_wrong_usage_is_one_sentence(
    argv: list[str], says: str, code: int, capsys: Capture
) -> None:
    assert parity("traffic", *argv) == code
    captured = capsys.readouterr()
    assert says in captured.err
    assert "Traceback" not in captured.err


def test_a_number_off_the_design_is_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(DESIGN, "cast_copy", ())
    assert parity("traffic", "--op", "cast_copy", "--dtype", "bf16", "--params", "4096") == 1
    assert "but should move 0 + 0" in capsys.readouterr().out


def test_json_keeps_whole_numbers() -> None:
    row = json.loads(as_json(count("unscale", "fp16", "flat", 1000)))["launches"][0]
    assert row["buffers"]["grads"]["read"] == 2000
    assert row["read_per_parameter"] == 2.0
