"""Promises of the compiled kernels, read off their PTX: arithmetic, access widths, no spills."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twinstep.fast.kernels import (
    accumulate,
    adam,
    cast,
    clip,
    finalise,
    loss_scale,
    pack,
    reduce,
    sgd,
)
from twinstep.fast.kernels import unscale as unscaling

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    **dict.fromkeys(("lr", "beta1", "beta2", "eps", "weight_decay", "max_norm"), "*fp64"),
    **dict.fromkeys(("momentum", "dampening", "scale", "scale_factor", "min_scale"), "*fp64"),
    **dict.fromkeys(("backoff_factor", "backoff", "growth", "floor"), "*fp64"),
    **dict.fromkeys(("norm", "found_inf", "inv_scale", "coefficients", "factor"), "*fp32"),
    **dict.fromkeys(("tensors", "regions", "chunks", "numel", "slot"), "i64"),
}


@dataclass(frozen=True)
class Case:
    """One kernel, compiled one way; `tensors` are pointers proven to lie on 16 bytes."""

    kernel: Any
    tensors: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    warps: int = 4

    def compile(self) -> Any:
        """Compile for an H100 or H200, which needs none to be there."""
        signature, constants, aligned = {}, {}, {}
        for index, param in enumerate(self.kernel.params):
            name = param.name
            if param.is_constexpr:
                signature[name] = "constexpr"
                constants[(index,)] = self.options[name]
            elif name in self.tensors:
                signature[name] = self.tensors[name]
                aligned[(index,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = POINTERS.get(name, "*i64")
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=aligned)
        options = {"enable_fp_fusion": False, "num_warps": self.warps}
        return triton.compile(source, target=HOPPER, options=options)

    def ptx(self) -> str:
        """Return the PTX."""
        return str(self.compile().asm["ptx"])


def state(grad: str, copy: str) -> dict[str, str]:
    return {
        "param": "*fp32",
        "grads": grad,
        "exp_avgs": "*fp32",
        "exp_avg_sqs": "*fp32",
        "momentums": "*fp32",
        "copies": copy,
    }


BF16 = {"P": tl.float32, "G": tl.bfloat16, "M": tl.float32, "C": tl.bfloat16}
WHOLE = {"BIAS_CORRECTION": True, "IS_TABLE": True, "CONSECUTIVE": False, "RAISE": True}
COMPAT = {"GROW_ON_WINDOW": False, "UNSCALE_WITH_NEW": False}
NORMS = {"NORM_1": False, "NORM_MAX": False, "NORM_GIVEN": False, "NORM_SCALED": False}
WRAPPED = {"EXTERNAL": False, "LAMB": False, "RANKS": False, "BOUNDED": False, **NORMS}
ADAM = {"DECOUPLED": True, "HAS_COPY": True}
SGD = {"HAS_MOMENTUM": True, "NESTEROV": True, "HAS_COPY": True}

STEPS = {
    rule: {**WHOLE, **COMPAT, **WRAPPED, "RULE": rule}
    for rule in ("static", "dynamic", "wrapper", "torch")
}
STEPS |= {norm: {**STEPS["wrapper"], norm: True} for norm in NORMS}
STEPS |= {"lamb": {**STEPS["wrapper"], "LAMB": True, "EXTERNAL": True, "NORM_SCALED": True}}
STEPS |= {"over ranks": {**STEPS["dynamic"], "RANKS": True}}
STEPS |= {"bounded": {**STEPS["wrapper"], "BOUNDED": True}}

UPDATES = {
    "adam flat": Case(adam.adam_flat_kernel, state("*bf16", "*bf16"), ADAM),
    "adam flat fp16": Case(adam.adam_flat_kernel, state("*fp16", "*fp16"), ADAM),
    "adam list": Case(adam.adam_list_kernel, {}, {**ADAM, **BF16}),
    "adam list L2": Case(adam.adam_list_kernel, {}, {**ADAM, **BF16, "DECOUPLED": False}),
}
ELEMENTWISE = {
    **UPDATES,
    "sgd flat": Case(sgd.sgd_flat_kernel, state("*bf16", "*bf16"), SGD),
    "sgd list": Case(sgd.sgd_list_kernel, {}, {**SGD, **BF16}),
    "cast flat": Case(cast.cast_flat_kernel, {"sources": "*fp32", "copies": "*fp16"}),
    "cast list": Case(cast.cast_list_kernel, {}, {"S": tl.float32, "C": tl.bfloat16}),
    "accumulate flat": Case(
        accumulate.accumulate_flat_kernel, {"accumulators": "*fp32", "grads": "*bf16"}
    ),
    "accumulate list": Case(
        accumulate.accumulate_list_kernel, {}, {"A": tl.float32, "G": tl.float16}
    ),
    "pack": Case(pack.copy_kernel, {}, {"W": tl.int16}),
}
UNSCALE = {
    "unscale flat": Case(unscaling.unscale_flat_kernel, {"grads": "*fp16"}),
    "unscale list": Case(unscaling.unscale_list_kernel, {}, {"G": tl.bfloat16}),
}
LIMBS = {"limbs": "*i64"}
REDUCE = {
    "reduce flat": Case(reduce.reduce_flat_kernel, {"grads": "*bf16", **LIMBS}, {"KIND": "2"}, 8),
    "reduce flat fp32": Case(
        reduce.reduce_flat_kernel, {"grads": "*fp32", **LIMBS}, {"KIND": "2"}, 8
    ),
    "reduce list": Case(reduce.reduce_list_kernel, LIMBS, {"G": tl.float16, "KIND": "2"}, 8),
}
FIXED = {"factor": "*fp64"}  # the rules' growth factor, not the factor of gradients
SCALAR = {
    "adam prepare": Case(adam.adam_prepare_kernel, {}, WHOLE),
    "sgd prepare": Case(sgd.sgd_prepare_kernel, {}, {"IS_TABLE": True}),
    "norm": Case(reduce.norm_kernel, LIMBS, {}, 1),
    "clip factor": Case(clip.clip_factor_kernel, {}, {}, 1),
    "clip coefficient": Case(clip.clip_coefficient_kernel, {}, {}, 1),
    "dynamic": Case(loss_scale.dynamic_kernel, FIXED, WHOLE, 1),
    "wrapper": Case(loss_scale.wrapper_kernel, FIXED, {}, 1),
    "torch": Case(loss_scale.torch_kernel, {}, {}, 1),
    **{
        f"finalise {name}": Case(finalise.finalise_kernel, {}, each) for name, each in STEPS.items()
    },
}
ALL = {**ELEMENTWISE, **UNSCALE, **REDUCE, **SCALAR}


def opcodes(ptx: str) -> Counter[str]:
    """Count the opcodes of a module, predicates left out."""
    found = re.findall(r"^\s+(?:@!?%p\d+\s+)?([a-z]\w*(?:\.[\w:]+)*)\s", ptx, flags=re.MULTILINE)
    return Counter(found)


ROUNDED = re.compile(r"(add|sub|mul|div|sqrt)\.(?!s\d|u\d|wide|lo|hi)")


def inexact(ptx: str) -> list[str]:
    """Return floating-point opcodes that round otherwise than once, to nearest even."""
    bad = []
    for opcode in opcodes(ptx):
        rounds = ROUNDED.match(opcode) and not opcode.split(".")[1].startswith("rn")
        loose = re.search(r"\.(ftz|approx|full|sat)\b", opcode)
        contracted = opcode.startswith(("fma.", "mad.f", "mad.rn"))
        narrows = re.match(r"cvt\.(?!rn\.)(\w+\.)?(f16|f32|bf16)(x2)?\.f(32|64)$", opcode)
        if rounds or loose or contracted or narrows:
            bad.append(opcode)
    return bad


def bytes_of_vectors(ptx: str) -> int:
    """Return how many bytes one thread moves in vector accesses of global memory."""
    widths = re.findall(r"(?:ld|st)\.global\.v(\d)\.b(\d+)", ptx)
    return sum(int(count) * int(bits) // 8 for count, bits in widths)


def named(cases: dict[str, Case]) -> Callable[..., Any]:
    return pytest.mark.parametrize("case", cases.values(), ids=cases.keys())


@named(ALL)
def test_a_kernel_rounds_every_operation_once_to_nearest_even(case: Case) -> None:
    assert inexact(case.ptx()) == []


@named(ALL)
def test_a_kernel_keeps_everything_in_registers(case: Case) -> None:
    ptx = case.ptx()
    assert not re.search(r"\.local\b", ptx)


@named(ELEMENTWISE)
def test_an_elementwise_kernel_needs_no_shared_memory(case: Case) -> None:
    compiled = case.compile()
    assert compiled.metadata.shared == 0
    assert "bar.sync" not in opcodes(compiled.asm["ptx"])


@named(UPDATES)
def test_a_full_chunk_of_the_update_moves_28_bytes_per_parameter(case: Case) -> None:
    assert bytes_of_vectors(case.ptx()) == 4 * 28


@named(REDUCE)
def test_the_reduction_reads_sixteen_bytes_at_a_time(case: Case) -> None:
    ptx = case.ptx()
    width = 4 if case.tensors.get("grads") == "*fp32" else 2
    # Four accesses of the loop, and one of the 1,024 elements from which the first window is taken.
    assert bytes_of_vectors(ptx) == 4 * 16 + 1024 // (32 * case.warps) * width
    found = Counter(re.findall(r"ld\.global\.v\d\.b\d+", ptx))
    assert found == Counter(["ld.global.v4.b32"] * 4 + [f"ld.global.v{width}.b32"])


@named({**ELEMENTWISE, **UNSCALE})
def test_aligned_tensors_are_accessed_four_elements_at_a_time(case: Case) -> None:
    ptx = case.ptx()
    assert re.search(r"ld\.global\.v[24]\.b32", ptx)
    assert re.search(r"st\.global\.v[24]\.b32", ptx)


@pytest.mark.parametrize(
    "opcode",
    [
        "fma.rn.f32",
        "div.full.f32",
        "sqrt.approx.f32",
        "mul.f32",
        "add.rn.ftz.f32",
        "add.f64",
        "cvt.rz.f16.f32",
        "cvt.rz.bf16.f32",
    ],
)
def test_the_check_refuses_other_arithmetic(opcode: str) -> None:
    assert inexact(f"\t@%p1 {opcode} \t%r1, %r2, %r3;\n") == [opcode]


@pytest.mark.parametrize(
    "opcode", ["add.s64", "mul.wide.u32", "sub.rn.f32", "cvt.rzi.s64.f64", "cvt.rn.bf16x2.f32"]
)
def test_the_check_lets_exact_arithmetic_pass(opcode: str) -> None:
    assert inexact(f"\t{opcode} \t%r1, %r2, %r3;\n") == []
