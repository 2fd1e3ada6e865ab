"""Ways to end, by commands: no command whose run was broken off is taken for one that was green.

The exit code is decided by the process that has printed the verdict; every other end of it, or of a
process that it asks, is another code than 0, with a sentence.
"""

from __future__ import annotations

import re

import pytest

from tests.helpers.forked_commands import End, ends_of

HEAD = """
import atexit, os, signal, sys, threading
from dataclasses import replace
import torch
from twinstep.parity import register, register_operation, register_optimizer
from twinstep.parity.operations.table import operation_named
from twinstep.reference.optimizers.fused_adam import FusedAdam

JUDGE = os.environ.get("JUDGE")

def kill(number):
    os.kill(os.getpid(), number)

def result(norm, max_norm):
    k = max_norm / (norm.double() + 1e-6)
    return (k if max_norm > 0 and k < 1 else torch.ones_like(k)).float()

class Falls:
    def __del__(self):
        raise ValueError("in __del__")

def fall():
    raise ValueError("in a thread")
"""
KERNEL = """
@register("clip_coefficient", arithmetic="exact", dtypes=("scalar",), layouts=())
def mine(*, norm, max_norm, factor):
    {}
    factor.copy_(result(norm, max_norm))
"""
LISTS = """
@register("cast_copy", dtypes=("bf16",))
def mine(sources, copies):
    {}
"""
REFERENCE = """
def reference(*, norm, max_norm, factor):
    {}
    return (result(norm, max_norm),)

given = operation_named("clip_coefficient", "test")
register_operation(replace(given, name="mine", reference=reference))

@register("mine", arithmetic="exact", dtypes=("scalar",), layouts=())
def kernel(*, norm, max_norm, factor):
    factor.copy_(result(norm, max_norm))
"""
STRATEGY = """
asked = []

def shape(own):
    asked.append(own)
    if len(asked) > 50:
        {}
    return own

given = operation_named("cast_copy", "test")
lists = (given.lists[0], replace(given.lists[1], shape=shape))
laws = ("value", "nothing_else_written", "repeat")
register_operation(replace(given, name="mine", lists=lists, laws=laws))

@register("mine", dtypes=("bf16",), layouts=("list",))
def kernel(sources, copies):
    for source, copy in zip(sources, copies, strict=True):
        copy.copy_(source)
"""
STEP = """
@register_optimizer("mine", reference="FusedAdam", dtypes=("fp32",))
class Mine(FusedAdam):
    def step(self, closure=None):
        {}
"""
IMPORT = KERNEL.format("pass") + "{}\n"
CHECK, PROVE = ("parity", "check", "{}"), ("parity", "prove", "{}")
GATE = ("parity", "bench", "gate", "{}", "--baseline", "{}")
PYTEST = ("pytest", "-p", "twinstep.parity.plugin", "-p", "no:cacheprovider", "--parity", "{}")
# Where it happens, what happens, the command as a user types it, its exit code, and its sentence.
WAYS = [
    (KERNEL, "sys.exit(0)", CHECK, 1, r"the kernel ends its process: SystemExit\(0\)"),
    (KERNEL, "os._exit(0)", CHECK, 1, "the kernel ends its process with exit code 0"),
    (KERNEL, "kill(signal.SIGKILL)", CHECK, 1, "the kernel crashes its process with SIGKILL"),
    (STEP, "raise SystemExit", CHECK, 1, "ends its process"),
    (IMPORT, "sys.exit(0)", CHECK, 2, "cannot be imported: SystemExit: 0"),
    (IMPORT, "os._exit(0)", CHECK, 2, "cannot be imported: it ends its process with exit code 0"),
    (REFERENCE, "raise SystemExit", CHECK, 3, "what it is judged against ends the"),
    (REFERENCE, "os._exit(0)", CHECK, 3, "ended with exit code 0 before its verdict"),
    (REFERENCE, "kill(signal.SIGKILL)", CHECK, 137, "ended with SIGKILL before its verdict"),
    (REFERENCE, "kill(signal.SIGTERM)", CHECK, 143, "parity: terminated"),
    (STRATEGY, "sys.exit(0)", CHECK, 3, "what it is judged against ends the"),
    (KERNEL, "quit()", PROVE, 3, r"the call ends its process: SystemExit\(None\)"),
    (KERNEL, "os._exit(0)", PROVE, 3, "the call ends its process"),
    (IMPORT, "os._exit(0)", PROVE, 3, "ended with exit code 0 before its verdict"),
    (REFERENCE, "sys.exit(0)", PROVE, 3, r"the call ends its process: SystemExit\(0\)"),
    (LISTS, "sys.exit(0)", GATE, 2, "its process ended with 0"),
    (KERNEL, "sys.exit(0)", PYTEST, 1, r"the kernel ends its process: SystemExit\(0\)"),
    (IMPORT, "os._exit(0)", PYTEST, 2, "cannot be imported: it ends its process with exit code 0"),
    # A launch in another thread, a finaliser and the end of the process come after the call has
    # done its work: Python prints what they raise, nothing of the judgement is lost.
    (
        KERNEL + "atexit.register(os._exit, 7)\n",
        "t = threading.Thread(target=fall); t.start(); t.join(); Falls()",
        CHECK,
        0,
        "all laws kept",
    ),
]
IDS = [f"{n}-{words[1]}-{body}" for n, (_, body, words, *_) in enumerate(WAYS)]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[End]:
    folder = tmp_path_factory.mktemp("ends")
    commands = []
    for number, (text, body, words, *_) in enumerate(WAYS):
        file = folder / f"file{number}.py"
        file.write_text(HEAD + text.format(body))
        commands.append([word.format(file) for word in words])
    return ends_of(commands, folder)


@pytest.mark.parametrize("number", range(len(WAYS)), ids=IDS)
def test_every_end_but_a_verdict_has_another_code_than_0(ends: list[End], number: int) -> None:
    (*_, code, says), (found, out, err) = WAYS[number], ends[number]
    assert found == code, out + err
    assert re.search(says, out + err), out + err
