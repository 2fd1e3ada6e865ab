"""Replay is switched on and off, refuses some launches, and leaves other drivers alone."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import twinstep.replay
from tools.source import ROOT
from twinstep.replay.isa.forms import pure_families
from twinstep.replay.ptx.flow import BRANCHES
from twinstep.replay.translate import emit_memory, emit_threads
from twinstep.replay.triton import driver
from twinstep.replay.triton.cubin import resources
from twinstep.replay.triton.device import INDEX

FUSION = "TRITON_DEFAULT_FP_FUSION"


@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


@triton.jit
def copy_through_table(table_ptr, out_ptr, n, BLOCK: tl.constexpr):
    source = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(source + at, mask=at < n), mask=at < n)


def test_activation_nests_and_restores_what_was_there() -> None:
    before = triton.runtime.driver._active
    depth = driver._COUNT
    twinstep.replay.activate()
    twinstep.replay.activate()
    assert twinstep.replay.active()
    twinstep.replay.deactivate()
    assert twinstep.replay.active()
    twinstep.replay.deactivate()
    assert depth == driver._COUNT
    assert triton.runtime.driver._active is before


def test_the_default_of_fusion_is_said_while_replay_is_active(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(FUSION, raising=False)
    default = triton.knobs.language.default_fp_fusion
    twinstep.replay.activate()
    try:
        assert os.environ[FUSION] == str(int(default))
        assert triton.knobs.language.default_fp_fusion == default
    finally:
        twinstep.replay.deactivate()
    assert FUSION not in os.environ


def test_what_the_user_says_of_fusion_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FUSION, "0")
    twinstep.replay.activate()
    twinstep.replay.deactivate()
    assert os.environ[FUSION] == "0"


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_an_untested_triton_is_refused_with_what_to_do(version: str) -> None:
    with pytest.raises(twinstep.replay.UnsupportedTriton, match=f"{version}.*3.6 to 3.9.*install"):
        driver.check_version(version)


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.9.0+git1234"])
def test_a_tested_triton_is_accepted(version: str) -> None:
    driver.check_version(version)


def test_flushed_subnormals_are_refused() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        with pytest.raises(twinstep.replay.ReplayError, match="flushed to zero"):
            twinstep.replay.activate()
    finally:
        torch.set_flush_denormal(False)


def test_compiled_kernels_are_kept_apart_by_device(replay: None) -> None:
    x = torch.ones(10)
    double[(1,)](x, 10, BLOCK=16)
    assert list(double.device_caches) == [INDEX]
    assert x.tolist() == [2.0] * 10


def test_a_warm_cache_runs_like_a_cold_one(
    replay: None, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        double.device_caches.clear()
        x = torch.ones(10)
        double[(1,)](x, 10, BLOCK=16)
        assert x.tolist() == [2.0] * 10


def test_an_empty_tensor_and_a_null_pointer_are_not_memory(replay: None) -> None:
    double[(1,)](torch.empty(0), 0, BLOCK=16)
    with pytest.raises(twinstep.replay.OutOfBounds):
        double[(1,)](torch.empty(0), 1, BLOCK=16)


def test_memory_that_no_tensor_holds_must_be_declared(replay: None) -> None:
    source, out = np.arange(16.0, dtype=np.float32), torch.zeros(16)
    table = torch.tensor([source.ctypes.data])
    with pytest.raises(twinstep.replay.OutOfBounds):
        copy_through_table[(1,)](table, out, 16, BLOCK=16)
    with twinstep.replay.allow(torch.from_numpy(source)):
        copy_through_table[(1,)](table, out, 16, BLOCK=16)
    assert out.tolist() == source.tolist()


def test_a_provider_is_asked_before_every_launch(
    replay: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twinstep.replay.launch import options

    source, out = torch.randn(16), torch.zeros(16)
    monkeypatch.setattr(options, "_PROVIDERS", [])
    twinstep.replay.register_buffer_provider(lambda: [source])
    copy_through_table[(1,)](torch.tensor([source.data_ptr()]), out, 16, BLOCK=16)
    assert torch.equal(out, source)


def test_logs_nest_and_close(replay: None) -> None:
    x = torch.ones(10)
    with twinstep.replay.launches() as outer:
        double[(1,)](x, 10, BLOCK=16)
        with twinstep.replay.launches() as inner:
            double[(1,)](x, 10, BLOCK=16)
    double[(1,)](x, 10, BLOCK=16)
    assert len(outer) == 2
    assert len(inner) == 1
    assert outer[0].hash == inner[0].hash


def test_the_published_list_of_instructions_is_what_the_code_knows() -> None:
    readme = Path(twinstep.replay.__file__).with_name("README.md").read_text()
    published = readme.split("with the code -->")[1].split("<!-- end")[0].split()
    known = {*pure_families(), *emit_memory.HANDLERS, *emit_threads.HANDLERS, *BRANCHES}
    assert published == sorted(known)


def test_a_virtual_tensor_is_zero_and_writable() -> None:
    x = twinstep.replay.virtual_tensor((5_000_000_000,), torch.bfloat16)
    x[4_999_999_999] = 1.5
    assert x[4_999_999_999] == 1.5
    assert x[0] == 0


@triton.jit
def hold_many(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.cumsum(tl.exp(x), 0) + tl.sort(x))


@pytest.mark.parametrize("options", [{}, {"maxnreg": 32}], ids=["free", "spilling"])
def test_registers_and_spills_are_those_of_the_binary(
    replay: None, options: dict[str, int]
) -> None:
    kernel = hold_many.warmup(torch.float32, torch.float32, N=2048, grid=(1,), **options)
    kernel._init_handles()
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = {n: int(v) for n, v in re.findall(r"\b(REG|STACK):(\d+)", text)}
    assert (kernel.n_regs, kernel.n_spills) == (usage["REG"], usage["STACK"] // 4)
    assert kernel.n_regs > 0
    assert bool(kernel.n_spills) == bool(options)


def test_a_binary_that_is_none_has_no_registers() -> None:
    assert resources(b"", "k") == (0, 0)
    assert resources(b"\x7fELF\x01" + 99 * b"\0", "k") == (0, 0)


def test_a_compiled_kernel_outlives_replay_without_a_word() -> None:
    """No driver may be there where it is collected: this process has none of a GPU."""
    program = (
        "import gc, torch, triton, tests.replay.test_replay_driver as own, twinstep.replay as r\n"
        "r.activate()\n"
        "own.double[(1,)](torch.ones(4), 4, BLOCK=4)\n"
        "r.deactivate()\n"
        "own.double.device_caches.clear()\n"
        "gc.collect()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not done.stderr
