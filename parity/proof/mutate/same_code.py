"""Proof that a mutant is the original: the compiler makes the same instructions of both.

Every variant that was compiled while the mutant was judged is compiled from the original source
too, for the same argument types, constants and options. Equal code for all of them proves that the
mutant can differ nowhere that the judge has been.
"""

from __future__ import annotations

import re
import sys
from typing import Protocol, cast

import triton
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from twinstep.parity.proof.mutate.sites import PACKAGE
from twinstep.replay.triton.device import INDEX

# What only reports where an instruction comes from.
_NOISE = re.compile(
    r"^\s*(\.loc|\.file|//|\$L__(tmp|func)\w*:|\.section|\.b8|\.b16|\.b32|\.b64|\{|\})"
)


class Compiled(Protocol):
    """Interface of a kernel that Triton has compiled."""

    asm: dict[str, object]
    src: ASTSource
    metadata: tuple[object, ...]


def instructions(ptx: str) -> str:
    """The text of a module without debug information."""
    body, _, _ = ptx.partition("\t.section\t.debug")
    kept = (
        line.partition("//")[0].rstrip() for line in body.splitlines() if not _NOISE.match(line)
    )
    return "\n".join(line for line in kept if line.strip())


def compiled() -> dict[tuple[str, str], list[Compiled]]:
    """Every variant that was compiled for replay, by module and name of the kernel."""
    found = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith(PACKAGE + "."):
            continue
        for key, function in vars(module).items():
            if isinstance(function, JITFunction) and function.__module__ == name:
                cache = function.device_caches.get(INDEX)
                variants = list(cache[0].values()) if cache else []
                if variants:
                    found[name, key] = cast("list[Compiled]", variants)
    return found


def same_code(mutants: dict[tuple[str, str], list[Compiled]]) -> int:
    """Number of variants if all are the original's, otherwise 0.

    Called where the original modules are importable again.
    """
    import importlib

    number = 0
    for (module, name), variants in mutants.items():
        original = getattr(importlib.import_module(module), name)
        for variant in variants:
            if instructions(str(variant.asm["ptx"])) != instructions(
                _recompiled(original, variant)
            ):
                return 0
            number += 1
    return number


def _recompiled(original: object, variant: Compiled) -> str:
    source = ASTSource(
        fn=original,
        signature=variant.src.signature,
        constexprs=variant.src.constants,
        attrs=variant.src.attrs,
    )
    metadata = variant.metadata
    fields = getattr(metadata, "_fields", ())
    options = {name: _hashable(getattr(metadata, name)) for name in fields}
    target = options.pop("target")
    return str(triton.compile(source, target=target, options=options).asm["ptx"])


def _hashable(value: object) -> object:
    """Metadata comes back from Triton's cache with lists where its options had tuples."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
