"""Static facts of our kernels keep their rules and ceilings, and every kind of breach is seen."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

import twinstep.parity.proof.gates.compile.build as building
from tests.helpers.command import parity
from twinstep.parity.proof.commands.compile import compile_all
from twinstep.parity.proof.corpus.triton_kernels import adamw_kernel
from twinstep.parity.proof.gates.compile import ceilings
from twinstep.parity.proof.gates.compile.artefacts import (
    code_bytes,
    of_amdgcn,
    of_ptx,
    of_usage,
    spilled,
)
from twinstep.parity.proof.gates.compile.build import Built, build, compiler
from twinstep.parity.proof.gates.compile.ceilings import (
    Ceilings,
    breaches,
    improvements,
    load,
    save,
    updated,
)
from twinstep.parity.proof.gates.compile.page import PAGE, page
from twinstep.parity.proof.gates.compile.variants import Variant, recorded, variants_of
from twinstep.parity.records.errors import NoDeviceError, UsageError
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import kernels

register_house()
HOPPER = "sm_90"
Capture = pytest.CaptureFixture[str]


@cache
def variants() -> list[Variant]:
    """Everything that our rows launch; not at import, which every test process does."""
    ours = [kernel for kernel in kernels() if kernel.name.startswith("triton.")]
    return variants_of(ours, optimizers=True)


def quiet(built: Built) -> None:
    """Hear of a result."""


def sample() -> list[Variant]:
    """The first and the last variant of each kernel: `make compile` takes all of them."""
    ends: dict[str, list[Variant]] = {}
    for variant in variants():
        ends.setdefault(variant.kernel, [variant, variant])[1] = variant
    return list({one.name: one for pair in ends.values() for one in pair}.values())


def wrong(**switches: object) -> Variant:
    """AdamW as `parity.proof.corpus` has it, with some switches wrong."""
    right = {
        "BLOCK": 256,
        "HAS_COPY": False,
        "MASK": 0,
        "IEEE": True,
        "IEEE_ROOT": True,
        "NARROW_INDEX": False,
        "LOST_BLOCK": False,
        "NARROW_MOMENTS": False,
        "COPY_VIA_FP16": False,
        "EPS_INSIDE": False,
        "MASKED_STORE": True,
        "enable_fp_fusion": False,
    }
    tensors = [torch.zeros(256) for _ in range(5)]
    with recorded() as found:
        adamw_kernel[(1,)](*tensors, 256, *[0.5] * 10, **{**right, **switches})
    (variant,) = found.values()
    return variant


def test_our_kernels_keep_rules_and_ceilings() -> None:
    found = build(sample(), [HOPPER], quiet)
    compilers = {HOPPER: compiler(HOPPER)}
    assert len({built.variant.kernel for built in found}) >= 22
    assert breaches(load(), found, compilers, whole=False) == []


def test_every_kernel_in_the_folder_is_launched() -> None:
    import twinstep.fast.kernels

    folder = Path(str(twinstep.fast.kernels.__file__)).parent
    jitted = set()
    for file in folder.glob("[!_]*.py"):
        module = __import__(f"twinstep.fast.kernels.{file.stem}", fromlist=["_"])
        jitted |= {
            value.fn.__name__
            for value in vars(module).values()
            if isinstance(value, JITFunction) and value.fn.__name__.endswith("_kernel")
        }
    assert jitted == {variant.kernel for variant in variants()}


def test_what_only_an_optimizer_class_launches_is_a_variant_of_that_class() -> None:
    users = {variant.name: variant.operations for variant in variants()}
    assert users["finalise_unscaled_kernel KIND=1 BIAS_CORRECTION LAST"] == {"BF16Optimizer"}
    assert users["reduce_flat_kernel grads=fp16 limbs=i64 KIND=inf"] >= {"FP16Optimizer"}
    assert any("LAMB" in name and "FP16UnfusedOptimizer" in users[name] for name in users)


def test_no_variant_of_ours_spills() -> None:
    spilled = {key for key, facts in load().facts.items() if facts["spilled"] or facts["local"]}
    assert not spilled


def test_the_table_of_ceilings_is_current() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "renew it: python -m twinstep.parity.proof.gates.compile.page"


def test_every_variant_has_a_ceiling_on_every_target() -> None:
    recorded_ = load().facts
    missing = {(v.name, t) for v in variants() for t in building.TARGETS} - set(recorded_)
    assert not missing, "record them: python -m twinstep.parity compile --update"


def test_recording_variants_compiles_and_runs_nothing() -> None:
    x = torch.zeros(256)
    with recorded() as found:
        adamw_kernel[(1,)](*[x] * 5, 256, *[0.5] * 10, 256, False, 0, *[True] * 2, *[False] * 6)
    assert len(found) == 1
    assert x.eq(0).all()


@pytest.fixture(scope="module")
def broken() -> dict[str, Built]:
    """Facts of one right and three wrong kernels, made in one child process."""
    kinds = {
        "right": wrong(),
        "approximate": wrong(IEEE=False),
        "contracted": wrong(enable_fp_fusion=True),
        "spilled": wrong(BLOCK=1024, num_warps=1),
    }
    found = build(list(kinds.values()), [HOPPER], quiet)
    return dict(zip(kinds, found, strict=True))


@pytest.mark.parametrize("kind", ["approximate", "contracted"])
def test_inexact_arithmetic_breaks_a_rule(kind: str, broken: dict[str, Built]) -> None:
    (breach,) = [b for b in breaches(Ceilings({}, {}), [broken[kind]], {}, False) if b.fact == kind]
    assert breach.before == 0
    assert breach.after is not None
    assert breach.after > 0


def test_the_right_kernel_breaks_none(broken: dict[str, Built]) -> None:
    assert breaches(Ceilings({}, {}), [broken["right"]], {}, False) == []


def test_a_spill_rises_above_its_ceiling(broken: dict[str, Built]) -> None:
    facts = broken["spilled"].facts
    assert facts["spilled"] > 0
    assert facts["local"] > 0
    name = broken["spilled"].variant.name
    known = Ceilings({HOPPER: "one"}, {(name, HOPPER): {**facts, "spilled": 0}})
    (breach,) = breaches(known, [broken["spilled"]], {HOPPER: "one"}, False)
    assert (breach.fact, breach.before, breach.after) == ("spilled", 0, facts["spilled"])


FACTS = {"registers": 40, "code": 1000, "load_width": 16}


@pytest.mark.parametrize(
    ("fact", "value", "breaks"),
    [
        ("registers", 41, True),
        ("registers", 39, False),
        ("code", 1001, True),
        ("load_width", 8, True),
        ("load_width", 32, False),
    ],
)
def test_ceilings_bound_from_above_and_floors_from_below(
    fact: str, value: int, breaks: bool
) -> None:
    variant = variants()[0]
    known = Ceilings({HOPPER: "one"}, {(variant.name, HOPPER): FACTS})
    built = Built(variant, HOPPER, {**FACTS, fact: value})
    found = breaches(known, [built], {HOPPER: "one"}, False)
    assert [(one.before, one.after) for one in found] == [(FACTS[fact], value)] * breaks
    assert improvements(known, [built]) == (not breaks)
    # Numbers of another compiler say nothing.
    assert breaches(known, [built], {HOPPER: "two"}, False) == []


def test_missing_stale_and_uncompiled_lines_are_breaches() -> None:
    first, second = variants()[:2]
    known = Ceilings({HOPPER: "one"}, {(second.name, HOPPER): FACTS})
    found = [Built(first, HOPPER, FACTS)]
    said = {b.variant: b.why for b in breaches(known, found, {HOPPER: "one"}, whole=True)}
    assert "has no ceiling" in said[first.name]
    assert "launched by no kernel" in said[second.name]
    failed = breaches(known, [Built(first, HOPPER, {}, "boom")], {HOPPER: "one"}, whole=False)
    assert "does not compile: boom" in failed[0].why


def test_the_file_is_sorted_and_reads_back(tmp_path: Path) -> None:
    names = [variant.name for variant in variants()[:3]]
    known = Ceilings({"sm_90": "a", "sm_80": "b"}, {(n, t): FACTS for n in names for t in "ba"})
    save(known, tmp_path / "c.json")
    assert load(tmp_path / "c.json") == known
    lines = (tmp_path / "c.json").read_text().splitlines()
    assert sum("registers" in line for line in lines) == 6
    save(load(), tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == ceilings.FILE.read_text()


def test_an_unreadable_file_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("[]")
    with pytest.raises(UsageError, match="is no file of ceilings"):
        load(tmp_path / "c.json")


def test_updating_part_of_a_target_with_another_compiler_is_refused() -> None:
    known = Ceilings({HOPPER: "one"}, {(variants()[1].name, HOPPER): FACTS})
    built = [Built(variants()[0], HOPPER, FACTS)]
    with pytest.raises(UsageError, match="update all of it"):
        updated(known, built, {HOPPER: "two"}, whole=False)
    assert set(updated(known, built, {HOPPER: "two"}, whole=True).facts) == {
        (variants()[0].name, HOPPER)
    }
    assert len(updated(known, built, {HOPPER: "one"}, whole=False).facts) == 2


CRASHING = """
import os, signal, sys
import triton

if sys.argv[0].endswith("worker.py"):
    os.kill(os.getpid(), signal.SIGSEGV)

@triton.jit
def crash_kernel(x):
    pass
"""


@pytest.fixture
def crashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Variant:
    """A kernel at which the child process dies."""
    (tmp_path / "crashing_module.py").write_text(CRASHING)
    monkeypatch.syspath_prepend(tmp_path)
    return replace(variants()[0], module="crashing_module", kernel="crash_kernel")


def test_a_crash_is_reported_and_the_others_are_compiled(crashing: Variant) -> None:
    after = wrong()
    found = build([crashing, after], [HOPPER], quiet)
    assert found[0].error.startswith("the compiler died of SIGSEGV")
    assert found[1].facts["registers"] > 0


def test_what_is_known_is_not_compiled_again(
    broken: dict[str, Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a child was started")

    monkeypatch.setattr("subprocess.Popen", refuse)
    variant = broken["right"].variant
    assert isinstance(variant, Variant)
    assert build([variant], [HOPPER], quiet) == [broken["right"]]
    with pytest.raises(AssertionError, match="a child was started"):
        build([replace(variant, warps=2)], [HOPPER], quiet)


PTX = """
	mov.b32 	%r12, 1065369472;
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	ld.global.L1::evict_last.b64 	%rd5, [%rd6];
	fma.rn.bf16x2 	%r10, %r6, %r12, %r8;
	fma.rn.f32 	%f1, %f2, %f3, %f4;
	mul.f32 	%f1, %f2, %f3;
	add.rn.f32 	%f1, %f2, %f3;
	@%p2 div.full.f32 	%f1, %f2, %f3;
	sqrt.approx.ftz.f32 	%f1, %f2;
	div.rn.f64 	%fd1, %fd2, %fd3;
	mad.lo.s32 	%r1, %r2, %r3, %r4;
	st.global.b16 	[%rd1], %rs1;
"""
AMDGCN = """
	global_load_dwordx4 v[0:3], v0, s[2:3]
	global_store_short v0, v1, s[2:3]
	s_load_dwordx8 s[4:11], s[0:1], 0x0
	v_fma_f64 v[0:1], v[0:1], v[0:1], v[0:1]
    .group_segment_fixed_size: 64
    .private_segment_fixed_size: 0
    .vgpr_count:     42
    .vgpr_spill_count: 3
"""


def test_facts_are_read_off_text() -> None:
    assert of_ptx(PTX) == {
        "approximate": 2,
        "contracted": 2,
        "float64": 1,
        "load_width": 16,
        "store_width": 2,
        "vector": 24,
    }
    usage = "REG:48 STACK:8 SHARED:1024 LOCAL:0 CONSTANT[0]:568"
    assert of_usage(usage) == {"registers": 48, "local": 8, "shared": 1024}
    assert spilled("8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads") == 16
    amd = of_amdgcn(AMDGCN)
    assert (amd["registers"], amd["spilled"], amd["shared"]) == (42, 3, 64)
    assert (amd["float64"], amd["load_width"], amd["store_width"], amd["vector"]) == (1, 16, 2, 16)


def test_what_is_no_artefact_is_refused() -> None:
    with pytest.raises(ValueError, match="names no registers"):
        of_usage("cuobjdump fatal")
    with pytest.raises(ValueError, match="64-bit ELF"):
        code_bytes(b"MZ")


def test_the_command_shows_before_and_after_of_a_breach(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "c.json"
    known = load()
    facts = {key: dict(row) for key, row in known.facts.items()}
    facts["torch_kernel", HOPPER]["registers"] -= 1
    save(Ceilings({**known.compilers, HOPPER: compiler(HOPPER)}, facts), file)
    op = ["update_scale_torch"]
    assert compile_all([HOPPER], op, None, False, file) == 1
    out = capsys.readouterr().out
    assert "rose above its ceiling" in out
    assert "1 breaches" in out
    assert compile_all([HOPPER], op, str(tmp_path / "f.json"), True, file) == 0
    assert "1 lines recorded in c.json" in capsys.readouterr().out
    assert compile_all([HOPPER], op, None, False, file) == 0
    assert "all rules and ceilings kept" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "f.json").read_text())["kernels"]
    assert row["variant"] == "torch_kernel"


def test_a_broken_rule_is_never_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: dict[str, Built], capsys: Capture
) -> None:
    monkeypatch.setattr("twinstep.parity.proof.commands.compile._variants", lambda _: [])
    monkeypatch.setattr(
        "twinstep.parity.proof.commands.compile._with_progress", lambda *_: [broken["contracted"]]
    )
    assert compile_all([HOPPER], None, None, True, tmp_path / "c.json") == 1
    assert "nothing was recorded" in capsys.readouterr().out
    assert not (tmp_path / "c.json").exists()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--target", "sm_70"], '--target "sm_70" is unknown'),
        (["--op", "lion"], '--op "lion" is unknown'),
        (["--frobnicate"], "frobnicate"),
    ],
)
def test_wrong_usage_is_one_sentence(argv: list[str], says: str, capsys: Capture) -> None:
    assert parity("compile", *argv) == 2
    assert says in capsys.readouterr().err


def test_a_missing_assembler_is_4(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    class Missing:
        @property
        def version(self) -> str:
            raise RuntimeError("Cannot find ptxas")

    monkeypatch.setattr(triton.knobs, "nvidia", type("Tools", (), {"ptxas": Missing()})())
    assert parity("compile", "--target", HOPPER) == 4
    assert "Triton finds no ptxas for sm_90" in capsys.readouterr().err
    with pytest.raises(NoDeviceError):
        compiler(HOPPER)
