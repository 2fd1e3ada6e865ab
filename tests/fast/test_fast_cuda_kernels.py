"""Kernels in CUDA C++: exact sums whatever is summed, and one way to compile and to refuse."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from twinstep.fast.kernels._limbs import LIMBS, NONFINITE, ORIGIN
from twinstep.fast.kernels.cuda import library, reduce
from twinstep.fast.kernels.cuda.reduce import add_squares, global_norm_
from twinstep.fast.kernels.reduce import new_limbs
from twinstep.fast.runtime.cache_folder import keep, kept
from twinstep.parity.cases.fixed_inputs import anything
from twinstep.parity.runner.calls.invoke import unable
from twinstep.replay.cuda import nvrtc

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.usefixtures("replay"),
    pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing() or "installed"),
]


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A cache folder of its own, and nothing kept in memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.compiled.cache_clear()
    yield tmp_path / "twinstep" / "sealed"
    library.compiled.cache_clear()


def summed(limbs: Tensor) -> Fraction:
    words = limbs.tolist()[: LIMBS.value]
    total = sum(word << (32 * place) for place, word in enumerate(words))
    return Fraction(total, 1 << (32 * ORIGIN.value))


def squares(tensors: Sequence[Tensor]) -> Fraction:
    """The sum as integers: every finite number is a multiple of 2**-149."""
    places = [int(Fraction(x) * 2**149) for one in tensors for x in one.double().tolist()]
    return Fraction(sum(place * place for place in places), 2**298)


def added(tensors: Sequence[Tensor]) -> Fraction:
    limbs = new_limbs(CPU)
    add_squares(tensors, limbs)
    assert limbs[NONFINITE.value] == 0
    return summed(limbs)


def finite(tensor: Tensor) -> Tensor:
    return torch.where(tensor.isfinite(), tensor, torch.zeros_like(tensor))


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_the_sum_of_every_16_bit_number_is_exact(dtype: torch.dtype) -> None:
    every = finite(torch.arange(2**16).to(torch.int16).view(dtype))
    shuffled = every[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    # In order the window moves with the numbers; shuffled, most numbers are outside of it.
    assert added([every]) == added([shuffled]) == squares([every])


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
def test_the_sum_of_any_bits_is_exact(dtype: torch.dtype) -> None:
    tensors = [finite(anything(size, 5 + size, dtype)) for size in (5, 4097, 0, 20_001)]
    assert added([one[1:] for one in tensors]) == squares([one[1:] for one in tensors])


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
@pytest.mark.parametrize("first", [-149, -30, 14])
def test_numbers_at_both_ends_of_a_window_are_exact(dtype: torch.dtype, first: int) -> None:
    """A large number, and after it every distance from it up to beyond the window."""
    found = []
    for distance in range(45):
        pair = torch.tensor([2.0 ** (first + distance)] * 3 + [2.0**first * 1.4140625] * 5)
        found += [pair, torch.zeros(4096), -pair.nextafter(torch.zeros(8))]
    tensor = finite(torch.cat(found).to(dtype))
    assert added([tensor]) == squares([tensor])


def test_a_sum_is_emptied_before_it_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares of nearly 2**52, more than 2**12 of them for each thread of one block."""
    monkeypatch.setattr(reduce, "resident", lambda *_: 1)
    largest = torch.full((256 * 4500,), torch.finfo(BRAIN).max, dtype=BRAIN)
    assert added([largest]) == largest.numel() * Fraction(torch.finfo(BRAIN).max) ** 2


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
def test_infinities_and_nans_are_counted_apart(dtype: torch.dtype) -> None:
    for what, wanted in ((torch.inf, torch.inf), (-torch.inf, torch.inf), (torch.nan, torch.nan)):
        grads = [torch.ones(5000, dtype=dtype), torch.ones(17, dtype=dtype)]
        grads[0][4999] = what
        norm, found_inf = torch.zeros(()), torch.zeros(())
        global_norm_(grads, norm=norm, found_inf=found_inf)
        assert torch.equal(norm.nan_to_num(nan=-1.0), torch.tensor(wanted).nan_to_num(nan=-1.0))
        assert found_inf == 1.0


def test_a_variant_is_compiled_once_and_kept(empty_cache: Path) -> None:
    macros = (("G", 0),)
    code = library.compiled("reduce", "ptx", 90, macros)
    (path,) = empty_cache.iterdir()
    assert kept(path) == code
    library.compiled.cache_clear()
    keep(path, b"as kept")
    assert library.compiled("reduce", "ptx", 90, macros) == b"as kept"
    library.compiled.cache_clear()
    path.write_bytes(path.read_bytes()[:-1])
    assert library.compiled("reduce", "ptx", 90, macros) == code
    assert library.compiled("reduce", "ptx", 80, macros) != b"as kept"


def test_nothing_is_contracted_or_flushed(empty_cache: Path) -> None:
    macros = (("C", 2), ("DECOUPLED", 1), ("G", 2), ("HAS_COPY", 1), ("P", 0))
    ptx = library.compiled("adam", "ptx", 90, macros).decode()
    assert "div.rn.f32" in ptx
    assert "sqrt.rn.f32" in ptx
    assert "fma." not in ptx
    assert ".ftz" not in ptx
    assert "approx" not in ptx


def test_the_loop_of_the_sum_has_no_float64(empty_cache: Path) -> None:
    ptx = library.compiled("reduce", "ptx", 90, (("G", 2),)).decode()
    kernels = {text.split("(")[0].strip(): text for text in ptx.split(".entry")[1:]}
    assert "f64" not in kernels["reduce_squares"]
    assert "f64" in kernels["round_norm"]


def test_a_source_that_is_wrong_is_refused_in_one_sentence(empty_cache: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^NVRTC refuses adam\.cu: .* \[fast\.kernels\.cuda\]$"):
        library.compiled("adam", "ptx", 90, ())
    assert not list(empty_cache.iterdir())


def test_without_nvrtc_there_is_one_sentence(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library._nvrtc.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(RuntimeError, match=r'install the extra "cuda" of this project') as caught:
        add_squares([torch.ones(3)], new_limbs(CPU))
    assert "\n" not in str(caught.value)
    assert unable(caught.value).startswith("the kernel needs NVRTC, which is not installed")
    library._nvrtc.cache_clear()
