"""Refusals: what replay cannot do is named with its place, as a limit of replay and no fault."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import twinstep.replay
from tests.helpers.profile import LONG
from twinstep.replay import CannotReplay, ReplayError, UnknownInstruction, errors, run_ptx
from twinstep.replay.corpus.store import read
from twinstep.replay.isa.limits import LIMITS, Limit, construct_of, markdown
from twinstep.replay.ptx.parse import parse
from twinstep.replay.translate.program import translate

HERE = __file__
HEAD = '.version 8.7\n.target sm_100a\n.address_size 64\n.file 1 "kernel.py"\n'
REGISTERS = ".reg .b16 %h<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>; .reg .pred %p<9>;"


def module(body: str, header: str = "", outside: str = "") -> str:
    """PTX of a kernel `k` whose body begins at line 5 of kernel.py."""
    entry = f"{outside}\n.visible .entry k() {header}\n"
    return f"{HEAD}{entry}{{\n{REGISTERS}\n.loc 1 5 0\n{body}\nret;\n}}\n"


def refused(text: str) -> CannotReplay:
    """The refusal of a module's kernel `k`."""
    with pytest.raises(CannotReplay) as caught:
        run_ptx(text, "k", (1,), (32,), [])
    message = str(caught.value)
    assert "a limit of replay and no fault of the kernel" in message
    assert "kernel k" in message
    assert "\n" not in message
    return caught.value


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.construct.replace(" ", "-"))
def test_every_limit_is_refused_by_its_name_and_line(limit: Limit) -> None:
    error = refused(module(limit.example))
    assert (error.construct, error.place) == (limit.construct, "kernel.py:5")
    words = limit.example.split()
    opcode = words[0].rstrip(";")
    assert f"`{' '.join(words).rstrip(';')}`" in str(error)
    assert opcode in str(error)


def test_the_published_limits_are_those_of_the_table() -> None:
    readme = Path(twinstep.replay.__file__).with_name("README.md").read_text()
    assert readme.split("with limits.py -->\n")[1].split("\n<!-- end")[0] == markdown()


def test_no_supported_form_is_listed_as_a_limit() -> None:
    from twinstep.replay.isa.forms import supported

    assert [form for form in supported() if construct_of(form) != form] == []


@pytest.mark.parametrize(
    ("statement", "construct"),
    [
        ("frobnicate.u32 %r1, %r2;", "frobnicate.u32"),
        ("add.shiny.f32 %f1, %f2, %f3;", "add.shiny.f32"),
        ("add.u32 %r1, %r2;", "add.u32"),
        ("add.u32 %r1, %r2, nowhere;", "add.u32"),
        ("add.u32 5, %r1, %r2;", "add.u32"),
        ("add.u32 %r1, %r2, %r77;", "%r77"),
        ("mov.u32 %r1, %envreg0;", "%envreg0"),
        ("bra NOWHERE;", "bra"),
        ("bra;", "bra"),
        ("brx.idx %r1, TARGETS;", "brx.idx"),
        ("ld.global.u32 %r1, [%rd1;", "ld.global.u32"),
        ("ld.global.u32 %r1, [[%rd1]];", "ld.global.u32"),
        ("ld.param.u32 %r1, [nothing];", "ld.param.u32"),
        ("st.param.u32 [nothing], %r1;", "st.param.u32"),
        ("call (%r1), nowhere, (%r2);", "call"),
        ("bar.sync %r1;", "bar.sync"),
        (".shiny 5;", ".shiny"),
        ("L: L: add.u32 %r1, %r2, %r3;", "L"),
    ],
)
def test_what_cannot_be_read_is_a_limit_with_its_line(statement: str, construct: str) -> None:
    error = refused(module(statement))
    assert (error.construct, error.place) == (construct, "kernel.py:5")


def test_without_source_lines_the_line_of_ptx_is_named() -> None:
    text = module("\nwgmma.fence.sync.aligned;").replace(".loc 1 5 0", "")
    assert (
        refused(text).place
        == f"PTX line {text.splitlines().index('wgmma.fence.sync.aligned;') + 1}"
    )


def test_clusters_of_cuda_are_refused_and_clusters_of_one_are_not() -> None:
    error = refused(module("", ".explicitcluster .reqnctapercluster 2, 1, 1"))
    assert error.construct == "cluster"
    run_ptx(module("", ".explicitcluster .reqnctapercluster 1, 1, 1"), "k", (1,), (32,), [])


def test_a_kernel_is_not_refused_for_another_kernel_of_its_module() -> None:
    other = f".entry other(.param .texref t) {{ {REGISTERS} mma.nothing [%r1, {{%r2}}]; ret; }}"
    run_ptx(module("", outside=other), "k", (1,), (32,), [])
    with pytest.raises(UnknownInstruction, match="kernel other"):
        run_ptx(module("", outside=other), "other", (1,), (32,), [0])


def test_a_kernel_that_is_not_there_is_no_limit_of_replay() -> None:
    with pytest.raises(ReplayError, match="No kernel nothing") as caught:
        run_ptx(module(""), "nothing", (1,), (32,), [])
    assert not isinstance(caught.value, CannotReplay)


def test_a_verdict_is_never_a_refusal() -> None:
    """Every error of the kernel's is apart from every error of replay's own."""
    every = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, ReplayError)}
    limits = {c.__name__ for c in every if issubclass(c, CannotReplay)}
    assert {c.__name__ for c in every} - limits == {
        *("ReplayError", "OutOfBounds", "Misaligned", "Deadlock", "NoProgress", "Race"),
        *("UninitialisedRead", "KernelTrap", "InvalidArithmetic"),
    }


@triton.jit
def through_descriptor(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [64, 64], [64, 1], [BLOCK, BLOCK])  # through a descriptor
    tile = x.load([0, 0])  # through a descriptor
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at[:, None] * BLOCK + at[None, :], tile)


@triton.jit
def given_descriptor(x, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at[:, None] * BLOCK + at[None, :], x.load([0, 0]))


@triton.jit
def copy(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


@pytest.mark.usefixtures("replay")
def test_descriptors_are_refused_with_the_line_of_the_kernel() -> None:
    x, out = torch.rand(64, 64), torch.zeros(16, 16)
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8))
    with pytest.raises(UnknownInstruction) as caught:
        through_descriptor[(1,)](x, out, BLOCK=16)
    assert caught.value.construct in ("TMA", "mbarrier")
    lines = Path(HERE).read_text().splitlines()
    marked = {i for i, line in enumerate(lines, 1) if line.endswith("through a descriptor")}
    assert caught.value.place in {f"{HERE}:{number}" for number in marked}


@pytest.mark.usefixtures("replay")
def test_a_descriptor_made_on_the_host_is_refused() -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    x, out = torch.rand(64, 64), torch.zeros(16, 16)
    with pytest.raises(CannotReplay) as caught:
        given_descriptor[(1,)](TensorDescriptor.from_tensor(x, [16, 16]), out, BLOCK=16)
    assert caught.value.construct in ("tensor descriptor", "TMA", "mbarrier")


@pytest.mark.usefixtures("replay")
def test_clusters_of_triton_are_refused() -> None:
    with pytest.raises(CannotReplay, match="copy runs in clusters of 2 blocks") as caught:
        copy[(2,)](torch.rand(512), torch.zeros(512), BLOCK=256, num_ctas=2)
    assert caught.value.construct == "cluster"


def mutated(text: str, rng: random.Random) -> str:
    """The text with some lines deleted, doubled, exchanged, or one of their characters changed."""
    lines = text.split("\n")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        line = lines[at]
        spot = rng.randrange(len(line)) if line else 0
        lines[at : at + 1] = rng.choice(
            [
                [],
                [line, lines[rng.randrange(len(lines))]],
                [line[:spot] + rng.choice('{}[](),;.%$@!:0a "/*-+|<>') + line[spot + 1 :]],
                [line[:spot] + line[spot + 1 :]],
                [" ".join(sorted(line.split(" "), key=lambda _: rng.random()))],
            ]
        )
    return "\n".join(lines)


def outcome(text: str, kernel: str) -> ReplayError | None:
    """The error of reading and translating a kernel."""
    try:
        translate(parse(text), kernel)
    except ReplayError as error:
        return error
    return None


@pytest.mark.parametrize("seed", range(200 if LONG else 20))
def test_no_text_makes_replay_fail_in_another_way_than_by_a_sentence(seed: int) -> None:
    """Each is read and translated, or refused with the kernel and a line."""
    rng, corpus = random.Random(seed), read()
    texts = [
        (mutated(corpus.text(e).whole, rng), e.kernel) for e in rng.sample(corpus.distinct(), 25)
    ]
    found = [error for text, kernel in texts if (error := outcome(text, kernel))]
    refusals = [error for error in found if isinstance(error, CannotReplay)]
    assert all(str(error).startswith("No kernel") for error in found if error not in refusals)
    assert all(error.construct and error.place for error in refusals)
    assert all("no fault of the kernel" in str(error) for error in refusals)
    assert not any("\n" in str(error) for error in refusals)
    assert 0 < len(refusals) < len(texts)
