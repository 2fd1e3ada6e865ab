"""Slowdowns planted in C++: the gate counts the machine instructions that a call executes."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest

from twinstep.benchmarks.regressions import counts, stepping
from twinstep.benchmarks.regressions.counts import Counted
from twinstep.benchmarks.regressions.growth import Growth, growths
from twinstep.parity.runner.load_file import load_file

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="kernels in C++ need g++")

ADD = "for (long i = 0; i < n; ++i) sums[i] += grads[i];"
CODE = (
    '#include <atomic>\n#include <vector>\nextern "C" void add('
    "float* __restrict sums, const float* __restrict grads, long n) {\n  BODY\n}\n"
)
KERNEL = """
import ctypes, subprocess
from pathlib import Path

from twinstep.parity import register

HERE = Path(__file__).parent
files = [str(HERE / "add.cpp"), "-o", str(HERE / "add.so")]
subprocess.run(["g++", "-O3", "-shared", "-fPIC", *files], check=True)
library = ctypes.CDLL(str(HERE / "add.so"))
library.add.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]


@register("accumulate", name="added", dtypes=("fp32",))
def added(accumulators, grads):
    for total, grad in zip(accumulators, grads, strict=True):
        library.add(total.data_ptr(), grad.data_ptr(), total.numel())
"""
PLANTED = {
    "an extra pass": "float most = 0; for (long i = 0; i < n; ++i) most += grads[i] * grads[i];\n"
    "  if (most < 0) return;\n  " + ADD,
    "scalar loads": ADD.replace("grads[i];", "((volatile const float*)grads)[i];"),
    "a barrier in the loop": ADD.replace("sums[i]", "std::atomic_thread_fence("
    "std::memory_order_seq_cst), sums[i]"),
    "a copy": "std::vector<float> own(grads, grads + n); grads = own.data();\n  " + ADD,
}  # fmt: skip


def counted(folder: Path, body: str) -> dict[str, Counted]:
    """Counts of the kernel in C++ with this body."""
    (folder / "add.cpp").write_text(CODE.replace("BODY", body))
    (folder / "kernel.py").write_text(KERNEL)
    (kernel,) = load_file(str(folder / "kernel.py")).kernels
    found = dict(counts.stepped(kernel, "fp32"))
    assert found, "nothing was counted"
    assert not any(one.missing for one in found.values()), found
    return found


def grown(before: dict[str, Counted], after: dict[str, Counted]) -> list[Growth]:
    """Costs that grew."""
    return growths({k: vars(v) for k, v in before.items()}, {k: vars(v) for k, v in after.items()})


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counted]:
    """Counts of the kernel as it was."""
    return counted(tmp_path_factory.mktemp("before"), ADD)


@pytest.mark.parametrize("planted", PLANTED)
def test_a_slowdown_planted_in_cpp_is_named(
    planted: str, before: dict[str, Counted], tmp_path: Path
) -> None:
    after = counted(tmp_path, PLANTED[planted])
    found = grown(before, after)
    sentence = r"^added fp32 flat: machine instructions executed grew from [\d,]+ to [\d,]+ \(\+"
    assert any(re.search(sentence, str(one)) for one in found), (list(map(str, found)), after)


def test_the_same_kernel_again_grows_nothing(before: dict[str, Counted], tmp_path: Path) -> None:
    after = counted(tmp_path, ADD)
    assert grown(before, after) == []


def test_the_count_is_that_of_the_loop(before: dict[str, Counted]) -> None:
    # Four elements a turn of at least load, add, store, branch; and not one instruction of Python.
    found = before["added fp32 flat"].facts[stepping.FACT]
    turns = stepping.SHAPES["flat"].numel / 4
    assert 4 * turns <= found <= 8 * turns


def test_handlers_are_as_they_were() -> None:
    known = [signal.getsignal(one) for one in (signal.SIGTRAP, signal.SIGSEGV)]
    stepping.instructions(lambda: None)
    assert [signal.getsignal(one) for one in (signal.SIGTRAP, signal.SIGSEGV)] == known
