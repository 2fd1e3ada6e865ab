"""Slowdowns planted in a kernel or its launcher: the gate names what grew, and by how much."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from twinstep.benchmarks.bench import main
from twinstep.benchmarks.regressions import counts
from twinstep.benchmarks.regressions.growth import growths
from twinstep.parity.runner.load_file import load_file

KERNEL = """
import triton
import triton.language as tl

from twinstep.parity import register


@triton.jit
def add(sums, grads, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        grad = tl.load(grads + at, mask=at < n)
        tl.store(sums + at, tl.load(sums + at, mask=at < n) + grad, mask=at < n)


@register("accumulate", name="summed", dtypes=("fp32",))
def summed(accumulators, grads):
    for total, grad in zip(accumulators, grads, strict=True):
        add[(8,)](total, grad, total.numel(), BLOCK=1024)
"""
LAUNCH = "        add[(8,)](total"
LOAD = "        grad = tl.load"
# What is planted, and the sentence about it.
PLANTED = {
    "an extra pass": (
        LOAD,
        "        tl.load(grads + at, mask=at < n, volatile=True)\n" + LOAD,
        r"bytes read grew from [\d,]+ to [\d,]+ \(\+\d+\.\d%\)",
    ),
    "scalar loads": (
        "@triton.jit\n",
        '@triton.jit(do_not_specialize=["n"])\n',
        r"memory accesses grew from [\d,]+ to [\d,]+ \(\+\d+\.\d%\)",
    ),
    "a synchronisation": (
        LAUNCH,
        "        grad.sum().item()\n" + LAUNCH,
        r"host reads of device values per tensor grew from 0 to 1",
    ),
    "a copy": (
        LAUNCH,
        "        grad = grad.clone()\n" + LAUNCH,
        r"bytes allocated per tensor grew from 0 to 1,024",
    ),
    "a loop over the tensors": (
        LAUNCH,
        "        for other in grads:\n            other is total\n" + LAUNCH,
        r"host bytecodes per tensor grew from [\d,.]+ to [\d,.]+",
    ),
    "a barrier in the loop": (
        LOAD,
        "        tl.debug_barrier()\n" + LOAD,
        r"barriers passed grew from 0 to [\d,]+",
    ),
    "a launch for each tensor more": (
        LAUNCH,
        LAUNCH + ", grad, 0, BLOCK=1024)\n" + LAUNCH,
        r"launches grew from 1 to 2 \(\+100\.0%\)",
    ),
}


def counted(folder: Path, text: str) -> dict[str, Any]:
    """Counts of the kernels in a file with this text, without machine code."""
    file = folder / "kernel.py"
    file.write_text(text)
    found = [row for kernel in load_file(str(file)).kernels for row in counts.of_kernel(kernel)]
    assert not any(one.missing for _, one in found), found
    return {label: vars(one) for label, one in found}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Counts of the kernel as it was."""
    return counted(tmp_path_factory.mktemp("before"), KERNEL)


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_slowdown_is_named(planted: str, before: dict[str, Any], tmp_path: Path) -> None:
    old, new, sentence = PLANTED[planted]
    assert KERNEL.count(old) == 1
    found = growths(before, counted(tmp_path, KERNEL.replace(old, new)))
    assert any(re.search(sentence, str(one)) for one in found), list(map(str, found))
    assert all(one.place.startswith(str(tmp_path)) for one in found)


def test_the_same_kernel_elsewhere_grows_nothing(before: dict[str, Any], tmp_path: Path) -> None:
    moved = KERNEL.replace("\nimport triton\n", "\n# A comment more.\nimport triton\n")
    assert growths(before, counted(tmp_path, moved)) == []


def test_the_gate_on_a_users_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """End to end, with the machine code: sentence, annotation, exit code."""
    old, new, _ = PLANTED["scalar loads"]
    for name, text in (("old.py", KERNEL), ("new.py", KERNEL.replace(old, new))):
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / "new.py"), "--baseline", str(tmp_path / "old.py")]
    assert main(["gate", *files, "--counts", "--annotate"]) == 1
    said = capfd.readouterr().out
    assert "sm_90: machine code, load_width fell from 16 to 4" in said
    assert re.search(r"^::error file=.*new\.py,line=\d+,title=parity bench gate::", said, re.M)
