"""Decorators that put a kernel on a shelf: `wrong` for the corpus, `harmless` for the variants.

A shelf is a plain list of one module. Nothing here touches the registry of the judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from twinstep.parity.proof.corpus import calls
from twinstep.parity.proof.corpus.calls import kernel_from
from twinstep.parity.proof.corpus.entry import Entry, Subject, Variant

RECORDS: dict[str, type] = {
    "adam_step": calls.AdamCall,
    "adamw_step": calls.AdamCall,
    "lamb_step": calls.LambCall,
    "apex_lamb_step": calls.ApexLambCall,
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
Record = TypeVar("Record", bound=Subject)
Piece = TypeVar("Piece")
# Name -> what is wrong, the piece that is, and rows of docs/reference/bugs.md.
Faults = Mapping[str, tuple[str, Piece, *tuple[str, ...]]]


def sentence(run: Callable[..., None]) -> str:
    """The docstring's first line: the shelf's description of the kernel."""
    lines = (run.__doc__ or "").strip().splitlines()
    if not lines:
        raise ValueError(
            f"{run.__name__} has no docstring, but should say what is wrong in one line"
        )
    return lines[0]


def put(
    shelf: list[Record],
    record: Callable[..., Record],
    operation: str,
    dtypes: tuple[str, ...] | None = None,
    **fields: object,
) -> Callable[[Run], Run]:
    """Decorator of a function of one call record: a kernel made of it goes on the shelf.

    Args:
        shelf: gets one more record.
        record: its class, built of the kernel and `fields`.
        operation: names the call record.
        dtypes: `scalar` for operations on scalars, otherwise bf16 gradients and copies.
        fields: the record's own.
    """
    usual = ("scalar",) if operation in SCALAR_OPERATIONS else ("bf16",)

    def decorate(run: Run) -> Run:
        name = run.__name__
        shelf.append(
            record(
                name=name,
                operation=operation,
                kernel=kernel_from(RECORDS[operation], run, name),
                says=sentence(run),
                dtypes=dtypes or usual,
                **fields,
            )
        )
        return run

    return decorate


def wrong(
    shelf: list[Entry],
    operation: str,
    *bugs: str,
    dtypes: tuple[str, ...] | None = None,
    **fields: object,
) -> Callable[[Run], Run]:
    """Decorator of a kernel that must be rejected; `fields` are those of `Entry`."""
    return put(shelf, Entry, operation, dtypes, bugs=bugs, **fields)


def harmless(
    shelf: list[Variant],
    operation: str,
    dtypes: tuple[str, ...] | None = None,
    **fields: object,
) -> Callable[[Run], Run]:
    """Decorator of a kernel that must be accepted; `fields` are those of `Variant`."""
    return put(shelf, Variant, operation, dtypes, **fields)


def plant(
    fault: Callable[..., Callable[[Callable[..., None]], object]],
    run: Callable[..., None],
    rows: Faults[Piece],
) -> None:
    """A wrong kernel for each row: a baseline with one piece of it replaced.

    Args:
        fault: makes the decorator, of the row's bugs.
        run: the baseline, which takes a call and the piece.
        rows: see `Faults`.
    """
    for name, (says, piece, *bugs) in rows.items():
        fault(*bugs)(named(name, says, lambda call, piece=piece: run(call, piece)))


def named(name: str, says: str, run: Callable[..., None]) -> Callable[..., None]:
    """The function under a name and a sentence of its own."""

    def kernel(call: object) -> None:
        run(call)

    kernel.__name__, kernel.__doc__ = name, says
    return kernel
