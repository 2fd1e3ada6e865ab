"""Static facts of the kernels in CUDA C++ keep rules and ceilings, and what is planted is seen."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path

import pytest
import torch

import twinstep.parity.proof.commands.compile as command
from twinstep.fast.kernels.cuda import library
from twinstep.fast.kernels.cuda.reduce import global_norm_
from twinstep.parity.proof.gates.compile.budgets import over_budget
from twinstep.parity.proof.gates.compile.build import TARGETS, Built, build
from twinstep.parity.proof.gates.compile.ceilings import breaches, load
from twinstep.parity.proof.gates.compile.cuda import (
    LOOPS,
    PREFIX,
    CudaVariant,
    applies,
    compilers,
    cuda_variants_of,
    facts_of_cuda,
    noted,
)
from twinstep.parity.proof.gates.compile.main_loop import code_of
from twinstep.parity.proof.gates.compile.shortest_way import main_loop
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import kernels
from twinstep.replay.cuda import nvrtc

register_house()
HOPPER = "sm_90"
needs_nvrtc = pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing() or "installed")


@cache
def variants() -> list[CudaVariant]:
    """Everything that the rows in CUDA C++ launch."""
    return cuda_variants_of([one for one in kernels() if one.name.startswith(PREFIX)])


def variant(kernel: str) -> CudaVariant:
    """The variant of a kernel for bf16 gradients, or its last one."""
    ours = [one for one in variants() if one.entry == kernel]
    return next((one for one in ours if "G=bf16" in one.name), ours[-1])


def recorded() -> dict[tuple[str, str], dict[str, int]]:
    return {key: facts for key, facts in load().facts.items() if key[0].startswith(PREFIX)}


def test_every_kernel_in_the_sources_is_launched() -> None:
    folder = resources.files(library.__package__)
    text = "".join(file.read_text() for file in folder.iterdir() if file.name.endswith(".cu"))
    heads = re.findall(r"__global__ void(?: __launch_bounds__\(\w+\))?\s+(\w+)\(", text)
    assert set(heads) == {one.entry for one in variants()}
    assert text.count("__global__") == len(heads)


def test_every_variant_has_a_ceiling_on_every_target_that_applies() -> None:
    wanted = {(one.name, t) for one in variants() for t in TARGETS if applies(t)}
    assert set(recorded()) == wanted, "record them: python -m twinstep.parity compile --update"


def test_the_recorded_loops_keep_their_budgets_and_nothing_spills() -> None:
    found = recorded()
    loops = [key for key, facts in found.items() if "loop" in facts]
    assert {name.split()[0].removeprefix(PREFIX) for name, _ in loops} == set(LOOPS)
    assert not [row for (name, t), facts in found.items() for row in over_budget(name, t, facts)]
    assert not [key for key, facts in found.items() if facts["spilled"] or facts["local"]]


@needs_nvrtc
def test_kernels_in_cuda_keep_rules_and_ceilings() -> None:
    found = build([variant(name) for name in LOOPS], [HOPPER, "gfx942"], lambda _: None)
    assert [built.target for built in found] == [HOPPER] * len(LOOPS)
    assert breaches(load(), found, compilers([HOPPER]), whole=False) == []


def test_noting_launches_runs_nothing() -> None:
    norm, found_inf = torch.zeros(()), torch.zeros(())
    with noted() as found:
        global_norm_([torch.ones(9)], norm=norm, found_inf=found_inf)
    assert sorted(found) == ["cuda.reduce_squares G=fp32", "cuda.round_norm G=fp32"]
    assert norm == 0
    assert library.listener is None


# Source, kernel, text and what is put in its place, and facts that then break a rule.
PLANTED = {
    "barrier": ("reduce", "reduce_squares", ("sum.add(x);", "__syncthreads(); sum.add(x);")),
    "no_wide_load": ("reduce", "reduce_squares", ("if (aligned && left >= TILE)", "if (false)")),
    "scalar_load": (
        "adam",
        "adam_update",
        (
            "load<G>(g, grads + at);",
            "for (int i = 0; i < COUNT; i++) g[i] = widen<G>(grads[at + i]);",
        ),
    ),
    "spill": (
        "adam",
        "adam_update",
        ("(THREADS)\n    adam_update", "(THREADS, 16)\n    adam_update"),
    ),
    "approximate": (
        "adam",
        "adam_update",
        ("(m / c.first)", "__fdividef(m, c.first)"),
    ),
}
BREAKS = {
    "barrier": "loop_barrier",
    "no_wide_load": "loop",
    "scalar_load": "loop_narrow",
    "spill": "spilled",
    "approximate": "approximate",
}


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A cache folder of its own, and nothing kept in memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.compiled.cache_clear()
    yield
    library.compiled.cache_clear()


def broken(one: CudaVariant) -> set[str]:
    """Facts of a variant that break a rule, with whatever compiler."""
    built = Built(one, HOPPER, facts_of_cuda(one, HOPPER))
    return {breach.fact for breach in breaches(replace(load(), compilers={}), [built], {}, False)}


@needs_nvrtc
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_in_a_kernel_in_cuda_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, kernel, (old, new) = PLANTED[name]
    right = library._text

    def planted(file: str) -> str:
        text = right(file)
        if file == f"{source}.cu":
            assert text.count(old) == 1
            return text.replace(old, new)
        return text

    monkeypatch.setattr(library, "_text", planted)
    assert BREAKS[name] in broken(variant(kernel))


@needs_nvrtc
@pytest.mark.usefixtures("own_cache")
def test_contraction_is_told_from_what_the_source_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    single = next(one for one in variants() if one.name == "cuda.reduce_squares G=fp32")
    assert "fma.rn.f32" in library.compiled("reduce", "ptx", 90, single.macros).decode()
    assert broken(single) == set()
    flags = [flag for flag in library.FLAGS if flag != "--fmad=false"]
    monkeypatch.setattr(library, "FLAGS", flags)
    library.compiled.cache_clear()
    assert "contracted" in broken(variant("adam_update"))


def places(text: str) -> Sequence[int]:
    return [one.place for one in main_loop(code_of(text))]


WAYS = """
        /*0000*/                   LDG.E.128 R4, [R2.64] ;
        /*0010*/              @!P0 BRA 0x40 ;
        /*0020*/                   BAR.SYNC 0x0 ;
        /*0030*/              @!P1 BRA 0x20 ;
        /*0040*/                   FADD R1, R1, R4 ;
        /*0050*/              @!P2 BRA 0x80 ;
        /*0060*/                   CALL.REL.NOINC 0xe0 ;
        /*0070*/                   BRA 0x0 ;
        /*0080*/                   FADD R1, R1, R4 ;
        /*0090*/                   FADD R1, R1, R4 ;
        /*00a0*/               @P0 CALL.REL.NOINC 0xc0 ;
        /*00b0*/                   BRA 0x0 ;
        /*00c0*/                   LDG.E.64 R8, [R8.64] ;
        /*00d0*/               @P3 BRA 0x0 ;
        /*00e0*/                   RET.REL.NODEC R20 0x0 ;
"""


def test_the_way_that_is_counted_leaves_out_rare_branches_and_calls() -> None:
    assert places(WAYS) == [0x0, 0x10, 0x40, 0x50, 0x80, 0x90, 0xA0, 0xB0]
    assert places(WAYS.replace(".128", ".64")) == places("") == []


def test_without_nvrtc_the_others_are_compiled_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nvrtc, "missing", lambda: "NVRTC is not installed.")
    assert {type(one) for one in command._variants(["global_norm"])} != {CudaVariant}
    assert "CUDA C++ kernels are not compiled: NVRTC is not installed." in capsys.readouterr().err
    assert compilers([HOPPER]) == {}
