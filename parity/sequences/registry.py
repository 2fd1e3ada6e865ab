"""Registered twins: an optimizer class and the reference class that it is judged against."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from twinstep.parity.records.errors import UsageError
from twinstep.parity.records.names import check_among
from twinstep.parity.sequences.actions import (
    Rules,
    public_methods,
    public_properties,
    read_properties,
)
from twinstep.parity.sequences.adam_rules import AdamRules, CompatAdamRules
from twinstep.parity.sequences.apex_lamb_rules import ApexLambRules
from twinstep.parity.sequences.bf16_rules import BF16Rules
from twinstep.parity.sequences.fp16_rules import FP16Rules
from twinstep.parity.sequences.fp16_unfused_rules import FP16UnfusedRules
from twinstep.parity.sequences.lamb_rules import LambRules
from twinstep.parity.sequences.over_ranks.bf16 import BF16OverRanks
from twinstep.parity.sequences.over_ranks.fp16 import FP16OverRanks
from twinstep.parity.sequences.over_ranks.zero import ZeroOverRanks
from twinstep.parity.sequences.private import kept_by
from twinstep.parity.sequences.rules import OptimizerRules
from twinstep.parity.sequences.scaler_rules import ScalerRules
from twinstep.parity.sequences.torch_rules import (
    TorchAdamRules,
    TorchAdamWRules,
    TorchLionRules,
    TorchSGDRules,
)
from twinstep.parity.sequences.zero_rules import ZeroRules
from twinstep.reference.optimizers.apex_lamb import FusedLAMB
from twinstep.reference.optimizers.bf16 import BF16Optimizer
from twinstep.reference.optimizers.fp16 import FP16Optimizer
from twinstep.reference.optimizers.fp16_unfused import FP16UnfusedOptimizer
from twinstep.reference.optimizers.fused_adam import FusedAdam
from twinstep.reference.optimizers.fused_lamb import FusedLamb
from twinstep.reference.optimizers.ordinary import SGD, Adam, AdamW, Lion
from twinstep.reference.optimizers.scalers import DynamicLossScale, StaticLossScale
from twinstep.reference.optimizers.zero import ZeroOptimizer

ARITHMETICS = ("bounded", "exact")
DTYPES = ("fp16", "bf16", "fp32", "mixed")
ENGINES = ("cuda", "replay", "cpu")
# References of ours by name, and the rules of each.
REFERENCES: Mapping[str, type] = {
    "FusedAdam": FusedAdam,
    "FusedLamb": FusedLamb,
    "FusedLAMB": FusedLAMB,
    "BF16Optimizer": BF16Optimizer,
    "FP16Optimizer": FP16Optimizer,
    "FP16UnfusedOptimizer": FP16UnfusedOptimizer,
    "ZeroOptimizer": ZeroOptimizer,
    "DynamicLossScale": DynamicLossScale,
    "StaticLossScale": StaticLossScale,
}
RULES: Mapping[type, Rules] = {
    FusedAdam: AdamRules(),
    FusedLamb: LambRules(),
    FusedLAMB: ApexLambRules(),
    BF16Optimizer: BF16Rules(),
    FP16Optimizer: FP16Rules(),
    FP16UnfusedOptimizer: FP16UnfusedRules(),
    ZeroOptimizer: ZeroRules(),
    DynamicLossScale: ScalerRules(),
    StaticLossScale: ScalerRules(),
}
# References with torch's interface alone, and the rules of each.
ORDINARY: Mapping[type, Rules] = {
    AdamW: TorchAdamWRules(),
    Adam: TorchAdamRules(),
    SGD: TorchSGDRules(),
    Lion: TorchLionRules(),
}
KNOWN = {**REFERENCES, **{one.__name__: one for one in ORDINARY}}
# Rules over ranks, by the rules that they add to; those that derive from others come first.
OVER_RANKS: Mapping[type[Rules], type[Rules]] = {
    ZeroRules: ZeroOverRanks,
    BF16Rules: BF16OverRanks,
    FP16Rules: FP16OverRanks,
}
Class = TypeVar("Class", bound=type)


@dataclass(frozen=True, kw_only=True)
class Twin:
    """A registered optimizer class.

    Attributes:
        name: unique.
        subject: the class that is judged.
        reference: the class that decides what is right.
        rules: the actions both are driven by.
        arithmetic: `exact`, or `bounded` for each update.
        dtypes: dtypes of parameters that it claims.
        private: attributes of the optimizer that are its own business: caches, buffers.
        properties: that are read after every action; found where the class is itself, since the
            judge's own process has a name in its place.
        flat: tensors of its state may be views of one buffer.
        engines: where it may run; empty means that the judge finds out.
        place: file and line of the class.
        triton: whether it launches Triton kernels, where that was found out in another process.
        source: the file that registers it, where that is known.
    """

    name: str
    subject: type
    reference: type
    rules: Rules
    arithmetic: str
    dtypes: tuple[str, ...]
    private: tuple[str, ...]
    properties: tuple[str, ...]
    flat: bool
    engines: tuple[str, ...]
    place: str
    triton: bool | None = None
    source: str = ""

    def over_ranks(self) -> Twin | None:
        """The same pair under rules over ranks, if there are such."""
        rules = ranked(self.rules)
        return None if rules is None else replace(self, rules=rules)

    @property
    def file(self) -> Path:
        """The file that registers the class, or else the one that defines it."""
        return Path(self.source or self.place.rpartition(":")[0])


_twins: dict[str, Twin] = {}


def ranked(rules: Rules) -> Rules | None:
    """Rules with the actions of a rule set over ranks; None if it has nothing there.

    They derive from the given ones, so that a user's own actions and exemptions stay.
    """
    own = type(rules)
    if "ranks" in rules.actions()["build"].choices:
        return rules
    for home, over in OVER_RANKS.items():
        if isinstance(rules, home):
            facts = {"__module__": over.__module__, "parts": (over, own)}
            found: Rules = object.__new__(type(f"{own.__name__}OverRanks", (over, own), facts))
            vars(found).update(vars(rules))
            return found
    return None


def register_optimizer(
    name: str | None = None,
    *,
    reference: type | str = "FusedAdam",
    arithmetic: str = "bounded",
    dtypes: Sequence[str] | None = None,
    rules: Rules | None = None,
    private: Sequence[str] = (),
    flat: bool = False,
    engines: Sequence[str] = (),
) -> Callable[[Class], Class]:
    """Register the decorated optimizer class; the class stays unchanged.

    Args:
        name: of the twin; the class's own by default.
        reference: the class that decides what is right, or the name of one of ours.
        arithmetic: "bounded" (each update within a bound derived from the reference's formula) or
            "exact" (every bit).
        dtypes: dtypes of parameters: fp16, bf16, fp32, mixed; those of the rules by default, which
            are the first three, or fp32 and bf16 for a class with torch's interface alone.
        rules: actions to drive both by; those of the reference, or of any torch optimizer.
        private: attributes that belong to the optimizer alone, besides those of a fast class of
            ours that it derives from.
        flat: tensors of the state may be views of one buffer.
        engines: cuda, replay, cpu; by default found out as for kernels.

    Raises:
        UsageError: a taken name, an unknown reference or value, a method that the reference has
            and the class has not, a method that no action drives, or a constructor argument that
            none passes.
    """

    def decorate(cls: Class) -> Class:
        place = _place(cls)
        if not inspect.isclass(cls):
            raise UsageError(f"{cls!r} is no class, but should be an optimizer class [{place}]")
        against = _reference(reference, place)
        chosen = rules if rules is not None else rules_of(against)
        if rules is None and arithmetic == "exact" and against is FusedAdam and _takes_compat(cls):
            chosen = CompatAdamRules()
        _check_methods(cls, against, chosen, place)
        chosen = chosen.fitted(cls, place)
        twin = Twin(
            name=name or cls.__name__,
            subject=cls,
            reference=against,
            rules=chosen,
            arithmetic=arithmetic,
            dtypes=tuple(chosen.dtypes if dtypes is None else dtypes),
            private=(*private, *kept_by(cls)),
            properties=read_properties(against, cls),
            flat=flat,
            engines=tuple(engines),
            place=place,
        )
        _check(twin)
        _twins[twin.name] = twin
        return cls

    return decorate


def rules_of(reference: type) -> Rules:
    """The rules of a reference of ours, or those of any torch optimizer."""
    return {**RULES, **ORDINARY}.get(reference, OptimizerRules())


def _takes_compat(cls: type) -> bool:
    """True if its constructor, or one that it hands unknown arguments to, has `compat`."""
    for base in cls.__mro__:
        if "__init__" in vars(base):
            found = inspect.signature(vars(base)["__init__"]).parameters
            if "compat" in found:
                return True
            if all(one.kind is not one.VAR_KEYWORD for one in found.values()):
                return False
    return False


def _reference(given: type | str, place: str) -> type:
    if isinstance(given, str):
        if given not in KNOWN:
            known = ", ".join(KNOWN)
            raise UsageError(
                f'reference "{given}" is unknown, but should be a class or one of {known} [{place}]'
            )
        return KNOWN[given]
    if not inspect.isclass(given):
        raise UsageError(f"reference is {given!r}, but should be a class [{place}]")
    return given


def _check_methods(cls: type, reference: type, rules: Rules, place: str) -> None:
    lacking = sorted(public_methods(reference) - public_methods(cls) - rules.exempt.keys())
    if lacking:
        plain = reference is FusedAdam and "initialize_states" in lacking
        raise UsageError(
            f"{cls.__name__} lacks {', '.join(lacking)}, but should have every public method of "
            f"{reference.__name__}"
            + '; reference="AdamW" or "Adam" wants torch\'s alone' * plain
            + f" [{place}]"
        )


def _check(twin: Twin) -> None:
    where = twin.place
    if twin.name in _twins:
        raise UsageError(
            f'optimizer "{twin.name}" is registered already at {_twins[twin.name].place}, '
            f"but names should be unique [{where}]"
        )
    check_among("arithmetic", [twin.arithmetic], ARITHMETICS, where)
    check_among("dtypes", twin.dtypes, DTYPES, where)
    check_among("engines", twin.engines, ENGINES, where)
    if not twin.dtypes:
        raise UsageError(f"dtypes is empty, but should name at least one [{where}]")
    idle = undriven(twin.reference, twin.rules)
    if idle:
        raise UsageError(
            f"no action of {type(twin.rules).__name__} drives {idle[0]}, but every public method "
            f"and property that can be assigned of {twin.reference.__name__} should have one, or "
            f"a reason in `exempt` [{where}]"
        )
    if twin.arithmetic == "bounded" and type(twin.rules).contracts is Rules.contracts:
        raise UsageError(
            f'arithmetic is "bounded", but {type(twin.rules).__name__} has no contracts that say '
            f'what an update may do; it should be "exact" [{where}]'
        )
    if twin.arithmetic == "bounded" and twin.over_ranks() is not None:
        raise UsageError(
            f'arithmetic is "bounded", but {type(twin.rules).__name__} has sequences over ranks, '
            f'which compare every bit; it should be "exact" [{where}]'
        )
    unpassed = sorted(constructor_arguments(twin.reference) - _accounted(twin.rules))
    if unpassed:
        raise UsageError(
            f"no action of {type(twin.rules).__name__} passes {unpassed[0]}, but every constructor "
            f"argument of {twin.reference.__name__} should be in `hyper`, `options`, `refused` or "
            f"`passed`, or have a reason in `exempt` [{where}]"
        )


def constructor_arguments(cls: type) -> set[str]:
    """Names of the constructor's arguments."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(cls).parameters.values()
    return {parameter.name for parameter in found if parameter.kind not in kinds}


def _accounted(rules: Rules) -> set[str]:
    return rules.arguments() | rules.exempt.keys()


def undriven(cls: type, rules: Rules) -> list[str]:
    """Public methods and assignable properties of a reference class that no action drives.

    What a property reads is compared after every action anyway.
    """
    assigned = {name for name in public_properties(cls) if getattr(cls, name).fset is not None}
    return sorted((public_methods(cls) | assigned) - rules.driven() - rules.exempt.keys())


def _place(cls: object) -> str:
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"  # type: ignore[arg-type]
    except (TypeError, OSError):
        return f"{getattr(cls, '__module__', '?')}:0"


def twins() -> tuple[Twin, ...]:
    """All registered twins, in the order of registration."""
    return tuple(_twins.values())


def registered_as(cls: object) -> Twin | None:
    """The twin whose subject a class is, if it is any."""
    return next((twin for twin in _twins.values() if twin.subject is cls), None)


@contextlib.contextmanager
def borrowed_twins() -> Iterator[list[Twin]]:
    """Collect what is registered inside the block, and forget it afterwards."""
    before = dict(_twins)
    collected: list[Twin] = []
    try:
        yield collected
    finally:
        collected += [twin for name, twin in _twins.items() if name not in before]
        _twins.clear()
        _twins.update(before)
