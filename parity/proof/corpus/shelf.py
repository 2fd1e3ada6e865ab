"""Decorators that put a kernel on a shelf: `wrong` for the corpus, `harmless` for the variants.

A shelf is a plain list of one module. Nothing here touches the registry of the judge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from twinstep.parity.proof.corpus import calls
from twinstep.parity.proof.corpus.calls import kernel_from
from twinstep.parity.proof.corpus.entry import Entry, Variant

RECORDS: dict[str, type] = {
    "adam_step": calls.AdamCall,
    "adamw_step": calls.AdamCall,
    "lamb_step": calls.LambCall,
    "sgd_step": calls.SgdCall,
    "unscale": calls.UnscaleCall,
    "global_norm": calls.GlobalNormCall,
    "clip_factor": calls.ClipFactorCall,
    "clip_coefficient": calls.ClipCoefficientCall,
    "update_scale_dynamic": calls.DynamicCall,
    "update_scale_wrapper": calls.WrapperCall,
    "update_scale_torch": calls.TorchScaleCall,
    "flatten": calls.FlattenCall,
    "unflatten": calls.UnflattenCall,
    "accumulate": calls.AccumulateCall,
    "cast_copy": calls.CastCopyCall,
    "mixed_step": calls.MixedCall,
}

SCALAR_OPERATIONS = frozenset(
    name for name in RECORDS if name.startswith(("clip_", "update_scale_"))
)

Run = TypeVar("Run", bound=Callable[..., None])
VALUE = "value"


def default_dtypes(operation: str) -> tuple[str, ...]:
    """`scalar` for the operations on scalars, otherwise bf16 gradients and copies."""
    return ("scalar",) if operation in SCALAR_OPERATIONS else ("bf16",)


def sentence(run: Callable[..., None]) -> str:
    """The docstring's first line: the shelf's description of the kernel."""
    lines = (run.__doc__ or "").strip().splitlines()
    if not lines:
        raise ValueError(
            f"{run.__name__} has no docstring, but should say what is wrong in one line"
        )
    return lines[0]


def wrong(
    shelf: list[Entry],
    operation: str,
    *bugs: str,
    component: str,
    law: str = VALUE,
    dtypes: tuple[str, ...] | None = None,
    arithmetic: str = "bounded",
    engines: tuple[str, ...] = ("cpu",),
    waits_for: str = "",
    claims: tuple[str, ...] = (),
    alone: bool = False,
) -> Callable[[Run], Run]:
    """Put a function of one call record on the shelf as a kernel that must be rejected."""

    def put(run: Run) -> Run:
        name = run.__name__
        shelf.append(
            Entry(
                name=name,
                operation=operation,
                bugs=bugs,
                component=component,
                law=law,
                kernel=kernel_from(RECORDS[operation], run, name),
                says=sentence(run),
                dtypes=dtypes or default_dtypes(operation),
                engines=engines,
                arithmetic=arithmetic,
                waits_for=waits_for,
                claims=claims,
                alone=alone,
            )
        )
        return run

    return put


def harmless(
    shelf: list[Variant],
    operation: str,
    *,
    dtypes: tuple[str, ...] | None = None,
    arithmetic: str = "bounded",
    engines: tuple[str, ...] = ("cpu",),
    unavailable: str = "",
) -> Callable[[Run], Run]:
    """Put a function of one call record on the shelf as a kernel that must be accepted."""

    def put(run: Run) -> Run:
        name = run.__name__
        shelf.append(
            Variant(
                name=name,
                operation=operation,
                kernel=kernel_from(RECORDS[operation], run, name),
                says=sentence(run),
                dtypes=dtypes or default_dtypes(operation),
                engines=engines,
                arithmetic=arithmetic,
                unavailable=unavailable,
            )
        )
        return run

    return put
