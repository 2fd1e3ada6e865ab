"""The GPU check on a simulated GPU: every part runs to its end, each fault has its sentence."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from tests.helpers.gpu_box import CLASSES, Fault, Graph, gpu_box, nothing, put
from twinstep.benchmarks import engines, gpu_check, graph, judged, large, steps, timing
from twinstep.benchmarks.gpu_check import ROWS
from twinstep.benchmarks.part import Job
from twinstep.parity.laws import LAWS
from twinstep.replay.triton.launcher import Launcher

NAMES = [row.name for row in ROWS]


def check(
    monkeypatch: pytest.MonkeyPatch, out: Path, *only: str
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Exit code, machine, and parts of a run by name."""
    monkeypatch.setenv("OUT", str(out))
    code = gpu_check.main(["--only", *(only or NAMES)])
    document = json.loads((out / "gpu-check.json").read_text())
    return code, document["machine"], {part["name"]: part for part in document["parts"]}


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for compute-sanitizer."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def test_all_parts_run_on_a_simulated_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tools: Path
) -> None:
    with gpu_box(tools=tools):
        code, machine, parts = check(monkeypatch, tmp_path)
    assert {name: part["reason"] for name, part in parts.items()} == dict.fromkeys(NAMES, "")
    assert code == 0
    assert machine["simulated"] is True
    assert machine["gpu"]["name"] == "NVIDIA H100 80GB HBM3"
    figures = {name: part["figures"] for name, part in parts.items()}
    assert figures["compile"]["variants"] >= 4
    cells = {name: row for name, row in figures["parity"].items() if name != "planted"}
    assert all(row["verdict"].startswith("all laws kept") for row in cells.values())
    # Four dtypes of a class; three laws of two launchers; one law of three dtypes.
    passed = {name: row["counts"]["passed"] for name, row in cells.items()}
    assert passed == {"fast.FusedAdam": 4, "clip_factor": 6, "large_index": 3}
    assert figures["parity"]["planted"] == ["waits_for_the_device", "casts_cached_under_capture"]
    assert figures["engines"]["elements"] > 100
    assert figures["graph"].keys() == {"flat", "list", *CLASSES}
    assert figures["opcodes"]["instructions"] == 4
    assert figures["large"] == {"elements": 9001, "pieces": 3}
    assert figures["sanitizer"]["racecheck"] == "ERROR SUMMARY: 0 errors"
    timed = figures["timing"]
    names = {f"{name}, {shape}" for name in steps.STEPS for shape in steps.SHAPES}
    assert timed.keys() == {row.name for row in timing.KERNELS} | names | {"cpu"}
    absent = {row.name for row in timing.KERNELS if "absent" in timed[row.name]}
    assert all(name.endswith("in CUDA C++") for name in absent)  # without NVRTC
    for row in timing.KERNELS:
        if row.name in absent:
            continue
        assert timed[row.name]["bytes"] == row.bytes * timed[row.name]["numel"]
        # By the clock of the box every launch and every copy takes a millisecond.
        assert timed[row.name]["of_the_copy_rate"] == 1.0
        assert timed[row.name]["work_ms"] == 1.0
    for name in names:
        assert timed[name]["host_ms"] > 0.0, timed[name]
    predicted = parts["timing"]["predicted"]["figures"]
    assert predicted.keys() == timed.keys()
    counted = {name for name in names if "launches" in predicted[name]}
    assert len(counted) == 2 * 3
    for name in counted:
        assert timed[name]["launches"] == predicted[name]["launches"], name


def at(module: str, *arguments: str) -> Callable[[Callable[[], None]], Fault]:
    """A fault of one process of a part."""

    def of(act: Callable[[], None]) -> Fault:
        def fault(job: Job) -> None:
            if job.module == module and set(arguments) <= set(job.arguments):
                act()

        return fault

    return of


@at("benchmarks.gpu_check", "graph")
def crash() -> None:
    """Die of an access."""
    os.kill(os.getpid(), signal.SIGSEGV)


@at("benchmarks.gpu_check", "graph")
def hang() -> None:
    """Never end."""
    time.sleep(600.0)


@at("benchmarks.gpu_check", "graph")
def lost_graph() -> None:
    """Replay nothing."""
    put(Graph, replay=lambda self: None)


@at("benchmarks.gpu_check", "graph")
def waiting_step() -> None:
    """Read a value after every step."""
    right = graph.step

    def step(state: Any, controls: dict[str, torch.Tensor]) -> None:
        right(state, controls)
        if torch.cuda.get_sync_debug_mode():
            controls["norm"].item()

    put(graph, step=step)


@at("benchmarks.engines", "cuda")
def wrong_kernel() -> None:
    """Let what kernels write on cuda differ in one bit."""
    right = engines.outputs

    def wrong(*given: Any) -> dict[str, torch.Tensor]:
        found = right(*given)
        next(value for value in found.values() if value.numel()).view(-1)[:1].view(torch.uint8)[
            :1
        ].bitwise_xor_(1)
        return found

    put(engines, outputs=wrong)


@at("benchmarks.gpu_check", "large")
def little_memory() -> None:
    """Have 16 GiB."""
    put(large, NUMEL=2**31 + 4099)
    put(torch.cuda, mem_get_info=lambda *_: (2**34, 2**34))


@at("benchmarks.gpu_check", "large")
def memory_in_use() -> None:
    """Have what is asked for, but not in one piece."""

    def full(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB")

    put(large, fill=full)


@at("benchmarks.compiled")
def no_assembler() -> None:
    """Compile nothing."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("ptxas fatal: unsupported .version 9.0")

    put(triton, compile=refuse)


@at("benchmarks.gpu_check", "timing")
def late_fault() -> None:
    """Fail in the middle of a part."""

    def refuse(self: Launcher, *_: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    right = timing.reduce_work

    def work(*given: Any) -> Callable[[], object]:
        put(Launcher, __call__=refuse)
        return right(*given)

    put(timing, KERNELS=[timing.KERNELS[0], timing.Timed("broken", 2, work)])


FAULTS = [
    ("graph", crash, "failed", "ended with status -11"),
    ("graph", hang, "failed", "was stopped after 1 s"),
    ("graph", lost_graph, "failed", "flat: tensors differ after captured step 0"),
    ("graph", waiting_step, "failed", "flat: the step waits for the GPU"),
    ("engines", wrong_kernel, "failed", "1 of 72 outputs differ, cuda against replay: "),
    ("large", little_memory, "skipped", "16 GiB of GPU memory free, needs 40"),
    ("large", memory_in_use, "failed", "OutOfMemoryError: CUDA out of memory"),
    ("compile", no_assembler, "failed", "ptxas fatal: unsupported .version 9.0"),
    ("timing", late_fault, "failed", "an illegal memory access"),
    ("sanitizer", None, "skipped", "compute-sanitizer is not on the PATH"),
]


@pytest.mark.parametrize(
    ("name", "fault", "status", "sentence"), FAULTS, ids=[f"{row[0]}-{row[2]}" for row in FAULTS]
)
def test_a_fault_has_its_sentence_and_the_others_go_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fault: Fault | None,
    status: str,
    sentence: str,
) -> None:
    limits = {row.name: 1.0 if fault is hang and row.name == name else 60.0 for row in ROWS}
    rows = tuple(gpu_check.Row(r.name, r.module, limits[r.name], r.shows) for r in ROWS)
    monkeypatch.setattr(gpu_check, "ROWS", rows)
    monkeypatch.setattr(gpu_check, "TOTAL_SECONDS", 1.0 + 60.0 if fault is hang else 120.0)
    other = "large" if name == "opcodes" else "opcodes"
    with gpu_box(fault or nothing):
        code, _, parts = check(monkeypatch, tmp_path, name, other)
    assert parts[name]["status"] == status
    assert sentence in parts[name]["reason"]
    assert parts[other]["status"] == "passed"
    assert code == (1 if status == "failed" else 3)
    if fault is late_fault:
        assert parts[name]["figures"].keys() == {"update"}


def read_on_the_host(self: Launcher, *given: Any) -> None:
    """Read an argument of every launch."""
    next(value for value in given if isinstance(value, torch.Tensor)).view(-1)[:1].tolist()
    execute(self, *given)


def few_blocks(self: Launcher, blocks: int, *given: Any) -> None:
    """Launch no more blocks than a narrow counter holds."""
    execute(self, min(blocks, 16), *given)


execute = Launcher.__call__
JUDGED = [
    ("clip_factor", "no_host_read", Launcher, {"__call__": read_on_the_host}),
    ("large_index", "large_index", Launcher, {"__call__": few_blocks}),
    ("planted", "graph_capture", torch.cuda, {"synchronize": lambda *_: None}),
]


@pytest.mark.parametrize(("row", "law", "owner", "wrong"), JUDGED, ids=[row[0] for row in JUDGED])
def test_a_fault_of_a_kernel_or_of_the_judge_fails_the_part(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    row: str,
    law: str,
    owner: object,
    wrong: dict[str, object],
) -> None:
    """In the judge's process for what is planted, else in that of `parity run`."""

    def fault(job: Job) -> None:
        if job.module == "benchmarks.gpu_check":
            put(judged, ONLY=(row,), LEFT_OUT=tuple(LAWS.keys() - {law}))
            if row != "planted":
                put(judged, planted=list)
        if (job.module == "parity") == (row != "planted"):
            put(owner, **wrong)

    with gpu_box(fault):
        code, _, parts = check(monkeypatch, tmp_path, "parity")
    assert code == 1
    if row == "planted":
        sentence = "waits_for_the_device breaks no law, but should break graph_capture alone"
        assert parts["parity"]["reason"] == sentence
        return
    assert f"1 runs are not clean: {row} ended with 1" in parts["parity"]["reason"]
    assert f"breaks `{law}`" in parts["parity"]["figures"][row]["output"]


def test_ranks_reduce_in_hooks_and_beside_the_host_on_a_simulated_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judged in a process of the part's process, as on a GPU, on one dtype."""

    def fault(job: Job) -> None:
        if job.module == "benchmarks.gpu_check":
            put(judged, ONLY=("fast.ZeroOptimizer",), LEFT_OUT=("large_index",), planted=list)
            right = judged.job_of
            fp16 = ("--dtype", "fp16")
            put(judged, job_of=lambda *row: Job("parity", [*right(*row).arguments, *fp16]))

    with gpu_box(fault):
        code, _, parts = check(monkeypatch, tmp_path, "parity")
    assert parts["parity"]["reason"] == ""
    assert code == 0
    row = parts["parity"]["figures"]["fast.ZeroOptimizer"]
    assert row["counts"]["passed"] == 1


def test_an_old_driver_is_a_failure_of_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence = "The NVIDIA driver on your system is too old (found version 11040)"

    def init() -> None:
        raise RuntimeError(f"{sentence}. Please update your GPU driver")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    code, machine, parts = check(monkeypatch, tmp_path)
    assert code == 1
    assert machine["gpu"] is None
    assert {part["status"] for part in parts.values()} == {"failed"}
    assert all(sentence in part["reason"] for part in parts.values())
