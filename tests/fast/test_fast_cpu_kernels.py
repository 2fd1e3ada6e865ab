"""Kernels of the CPU: one set of bits for all instruction sets and threads, and one build."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from twinstep.fast.kernels._limbs import LIMBS, NONFINITE
from twinstep.fast.kernels.adam import adam_step_ as adam_list
from twinstep.fast.kernels.cpu.accumulate import accumulate_
from twinstep.fast.kernels.cpu.adam import adam_step_, adamw_step_
from twinstep.fast.kernels.cpu.reduce import add_squares, global_norm_
from twinstep.fast.kernels.lamb import lamb_step_
from twinstep.fast.kernels.reduce import new_limbs, reduce_gradients
from twinstep.fast.kernels.sgd import sgd_step_
from twinstep.fast.kernels.unscale import unscale_
from twinstep.fast.runtime import building
from twinstep.fast.runtime import native as library
from twinstep.parity.cases.fixed_inputs import anything, moderate
from twinstep.parity.runner.calls.invoke import unable

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
SIZES = (70_001, 0, 1, 4096, 33)  # two threads, several chunks, a tail of every width
CPU = torch.device("cpu")
SETS = list(library.INSTRUCTION_SETS)
HERE = SETS[: SETS.index(library.instruction_set()) + 1]


def drawn(dtype: torch.dtype, key: int) -> list[Tensor]:
    """Tensors of any bit patterns."""
    return [anything(size, key + at, dtype) for at, size in enumerate(SIZES)]


def number(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(value, dtype=dtype)


def launched() -> list[Tensor]:
    """Results of the kernels that stand in for Triton's."""
    params, means, copies = drawn(SINGLE, 200), drawn(SINGLE, 220), drawn(HALF, 240)
    squares, scaled = [value.abs() for value in drawn(SINGLE, 260)], drawn(BRAIN, 280)
    grads = [value.nan_to_num() * 2.0**-40 for value in drawn(BRAIN, 300)]
    steps = [torch.tensor(at) for at in range(len(SIZES))]
    numbers: dict[str, Any] = {"lr": number(0.01), "weight_decay": number(0.1)}
    numbers |= {"factor": number(2.0**-7, SINGLE), "found_inf": number(0.0, SINGLE)}
    rates = {"momentum": number(0.9), "dampening": number(0.1)}
    sgd_step_(params, grads, means, copies, steps, **numbers, **rates, nesterov=True)
    numbers |= {"beta1": number(0.9), "beta2": number(0.999), "eps": number(1e-8)}
    lists = (params, grads, means, squares, copies, steps)
    adam_list(*lists, **numbers, bias_correction=True)
    numbers |= {"max_coeff": number(10.0), "min_coeff": number(0.01)}
    lamb_step_(*lists, **numbers, bias_correction=True, eps_inside_sqrt=False)
    unscale_(scaled, inv_scale=number(0.3, SINGLE), found_inf=number(0.0, SINGLE))
    found = [*params, *means, *squares, *copies, *scaled, *steps]
    for kind in ("1", "2", "inf"):
        limbs = new_limbs(CPU)
        reduce_gradients([value.nan_to_num() for value in drawn(HALF, 320)], limbs, kind=kind)
        found.append(limbs)
    return found


def results() -> list[Tensor]:
    """All that the kernels write, for inputs of every bit pattern, as integers; NaN as one."""
    found: list[Tensor] = []
    for step, grad, low in ((adam_step_, HALF, BRAIN), (adamw_step_, BRAIN, HALF)):
        params, means = drawn(SINGLE, 1), drawn(SINGLE, 20)
        squares = [value.abs() for value in drawn(SINGLE, 40)]
        copies = [torch.empty(size, dtype=low) for size in SIZES]
        steps = [torch.tensor(at) for at in range(len(SIZES))]
        numbers: dict[str, Any] = {"lr": number(0.01), "beta1": number(0.9), "beta2": number(0.999)}
        numbers |= {"eps": number(1e-8), "weight_decay": number(0.1)}
        numbers |= {"factor": number(2.0**-7, SINGLE), "found_inf": number(0.0, SINGLE)}
        lists = (params, drawn(grad, 60), means, squares, copies, steps)
        step(*lists, **numbers, bias_correction=True)
        found += [*params, *means, *squares, *copies]
    for dtype in (HALF, BRAIN, SINGLE):
        sums = drawn(dtype, 80)
        accumulate_(sums, drawn(SINGLE, 100))
        limbs = new_limbs(CPU)
        add_squares([value.nan_to_num() for value in drawn(dtype, 120)], limbs)
        alike = new_limbs(CPU)
        add_squares([moderate(size, 140, dtype) for size in SIZES], alike)
        found += [*sums, limbs, alike]
    found += launched()
    return [
        value.nan_to_num(nan=1.5).view(torch.int16 if value.itemsize == 2 else torch.int32)
        if value.is_floating_point()
        else value
        for value in found
    ]


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the kernels those of another build."""

    def built(*flags: str) -> None:
        loaded = ctypes.CDLL(str(library.built(flags)))
        monkeypatch.setattr(library, "library", lambda: loaded)

    return built


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("name", HERE)
def test_every_instruction_set_has_the_bits_of_one_thread_and_no_vectors(
    name: str, use: Callable[..., None]
) -> None:
    use(*library.INSTRUCTION_SETS[name])
    found = results()
    torch.set_num_threads(1)
    use("-O1", "-fno-tree-vectorize")
    for one, other in zip(found, results(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif("AVX2" not in HERE, reason="the CPU has no fused multiply-add")
def test_these_inputs_show_a_fused_multiply_add(use: Callable[..., None]) -> None:
    found = results()
    use("-mfma", "-ffp-contract=fast")
    assert not all(torch.equal(one, other) for one, other in zip(found, results(), strict=True))


def told(limbs: Tensor) -> tuple[int, bool, bool]:
    """The sum in units of 2**-352, and whether an infinity or a NaN was met."""
    words = limbs.tolist()
    odd = words[NONFINITE.value]
    total = sum(word << (32 * place) for place, word in enumerate(words[: LIMBS.value]))
    return total, odd & 0xFFFFFFFF > 0, odd >> 32 > 0


@pytest.mark.usefixtures("replay")
@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
def test_sums_are_those_of_the_gpu_kernel(dtype: torch.dtype) -> None:
    """Of any bits, of numbers of like size, of a wide range in one block, and of zeros."""
    every = drawn(dtype, 7)
    finite = [value.nan_to_num(posinf=3.0, neginf=-3.0) for value in every]
    usual = [moderate(size, 9, dtype) for size in SIZES]
    wide = [
        one * two for one, two in zip(usual, (moderate(s, 4, dtype) for s in SIZES), strict=True)
    ]
    tiny = [(value.double() * 2.0**-130).to(dtype) for value in usual]
    for grads in (every, finite, usual, wide, tiny, [finite[0] * 0]):
        ours, theirs = new_limbs(CPU), new_limbs(CPU)
        add_squares(grads, ours)
        reduce_gradients(grads, theirs)
        assert told(ours)[1:] == told(theirs)[1:]
        if not any(told(ours)[1:]):
            assert told(ours) == told(theirs)


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
@pytest.mark.parametrize("exponent", [-149, -126, -24, -1, 15, 127])
def test_sums_of_a_block_at_every_range_are_exact(dtype: torch.dtype, exponent: int) -> None:
    """512 of the largest numbers below a power of two, and one at every distance below them."""
    full = torch.full((), 2.0).to(dtype).nextafter(torch.zeros((), dtype=dtype)).double()
    for distance in range(60):
        block = [full * 2.0**exponent] * 511 + [full * 2.0 ** (exponent - distance)]
        values = torch.stack(block).to(dtype).nan_to_num(posinf=0.0)
        limbs = new_limbs(CPU)
        add_squares([values], limbs)
        places = [int(Fraction(value) * 2**149) for value in values.double().tolist()]
        assert told(limbs)[0] == sum(place * place for place in places) << (352 - 298)


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_every_16_bit_number_is_read_as_it_is(dtype: torch.dtype) -> None:
    every = torch.arange(2**16).to(torch.int16).view(dtype)
    sums = torch.zeros(2**16)
    accumulate_([sums], [every])
    wanted = every.float() + 0.0
    assert torch.equal(sums.nan_to_num(nan=1.5), wanted.nan_to_num(nan=1.5))
    assert torch.equal(sums.signbit()[~sums.isnan()], wanted.signbit()[~sums.isnan()])


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_every_tie_between_16_bit_numbers_goes_to_even(dtype: torch.dtype) -> None:
    every = torch.arange(2**16).to(torch.int16).view(dtype)
    low = every.float().nan_to_num(posinf=0.0, neginf=0.0)
    high = torch.nextafter(every, torch.full_like(every, torch.inf)).float()
    middle = low + (high - low) / 2
    near = torch.cat([middle, torch.nextafter(middle, high), torch.nextafter(middle, low)])
    near = near[near.isfinite()]
    sums = torch.zeros(near.numel(), dtype=dtype)
    accumulate_([sums], [near])
    assert torch.equal(sums.view(torch.int16), (near + 0.0).to(dtype).view(torch.int16))


def test_subnormals_live_where_the_caller_flushes_them() -> None:
    sums, tiny = torch.full((70_000,), 2.0**-127), torch.full((70_000,), 2.0**-149)
    norm, found_inf = torch.zeros(()), torch.zeros(())
    assert torch.set_flush_denormal(True)
    try:
        accumulate_([sums], [tiny])
        global_norm_([tiny], norm=norm, found_inf=found_inf)
        flushes = (torch.full((64,), 2.0**-126) * 0.5 == 0).all()
    finally:
        torch.set_flush_denormal(False)
    assert flushes  # still, afterwards
    assert (sums.view(torch.int32) == 2**22 + 1).all()
    assert norm.item() == pytest.approx(2.0**-149 * 70_000**0.5, rel=0.01, abs=0.0)


@pytest.mark.parametrize(
    ("compiler", "says"),
    [
        ("no-such-compiler", r"^there is no C\+\+ compiler \(no-such-compiler\), but CPU kernels"),
        ("false", r"^\S+false ended with 1, but should compile the CPU kernels: "),
    ],
)
def test_without_a_compiler_that_works_there_is_one_sentence(
    compiler: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match=says) as caught:
        library.built(())
    assert "\n" not in str(caught.value)
    # The judge then cannot judge; a compiler that fails is a defect.
    assert unable(caught.value).startswith("the kernel needs a C++ compiler") == ("no-" in compiler)
    assert not list((tmp_path / "twinstep" / "sealed").glob("*.so"))


def test_builders_at_once_build_it_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "c++"
    slow.write_text(f'#!/bin/sh\necho x >>{tmp_path}/builds\nsleep 0.3\nexec c++ "$@" -O0\n')
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor(3) as pool:
        (target,) = {*pool.map(library.built, [()] * 3)}
    assert (tmp_path / "builds").read_text() == "x\n"
    assert ctypes.CDLL(str(target)).twinstep_accumulate
    assert sorted(path.suffix for path in target.parent.iterdir()) == [".lock", ".so"]


def test_a_library_that_is_cut_short_or_changed_is_built_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = building.Source(
        name="one", what="one", where="here", main="one.cpp", files={"one.cpp": "int one = 1;"}
    )
    target = building.built(source, ["-shared"])
    whole = target.read_bytes()
    for wrong in (b"", whole[:-1], whole[:4000], b"\0" + whole[1:]):
        target.write_bytes(wrong)
        assert building.built(source, ["-shared"]) == target
        assert ctypes.c_int.in_dll(ctypes.CDLL(str(target)), "one").value == 1
        target.unlink()  # a loaded file must not be written over
        target.write_bytes(whole)
    assert not [path for path in target.parent.iterdir() if path.suffix not in (".so", ".lock")]


def test_a_compiler_may_have_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "c++ -DONE=1")
    source = building.Source(
        name="one", what="one", where="here", main="one.cpp", files={"one.cpp": "int one = ONE;"}
    )
    assert building.built(source, ["-shared"]).exists()


def test_tensors_elsewhere_are_refused() -> None:
    there = [torch.zeros(2, device="meta")]
    with pytest.raises(RuntimeError, match="tensors are on meta, but should be on the CPU"):
        accumulate_(there, there)


def test_what_is_not_contiguous_is_refused() -> None:
    steps = [torch.tensor(0)]
    lists: Any = ([torch.zeros(2, 4).t()], *([torch.zeros(4, 2)] for _ in range(3)), [], steps)
    names = ("lr", "beta1", "beta2", "eps", "weight_decay")
    controls: dict[str, Any] = dict.fromkeys(names, number(0.5))
    controls |= {"factor": number(1.0, SINGLE), "found_inf": number(0.0, SINGLE)}
    with pytest.raises(ValueError, match="contiguous"):
        adam_step_(*lists, **controls, bias_correction=True)
    assert steps == [0]
