"""The list of what can be judged: operations, laws, kernels; classes and the actions on them."""

from __future__ import annotations

import inspect

from rich.console import Console

from twinstep.parity.operations.table import operations
from twinstep.parity.registry.house_kernels import register_house
from twinstep.parity.registry.kernels import Kernel, kernels
from twinstep.parity.report.words import print_hanging
from twinstep.parity.sequences.actions import Rules
from twinstep.parity.sequences.house_optimizers import register_our_optimizers
from twinstep.parity.sequences.registry import ORDINARY, twins


def print_list(actions: bool = False) -> None:
    """`parity list`; with what each action does, if that is asked for."""
    register_house()
    register_our_optimizers()
    screen = Console()
    by_operation: dict[str, list[Kernel]] = {}
    for kernel in kernels():
        by_operation.setdefault(kernel.operation.name, []).append(kernel)
    for operation in operations():
        print_hanging(screen, f"{operation.name}: ", operation.summary.split(), "bold")
        print_hanging(screen, "  dtypes   ", operation.combinations)
        print_hanging(screen, "  laws     ", operation.laws)
        for kernel in by_operation.get(operation.name, []):
            claims = f"({kernel.arithmetic}, {', '.join(kernel.engines) or 'any engine'})"
            print_hanging(screen, "  kernel   ", [kernel.name, claims])
    for reference, rules in ORDINARY.items():
        print_hanging(
            screen, f"{reference.__name__}: ", ["any", "class", "with", "torch's", "interface"]
        )
        print_hanging(screen, "  defined  ", [reference.__module__])
        print_hanging(screen, "  built    ", _constructor(reference).split())
        print_hanging(screen, "  dtypes   ", rules.dtypes)
        if actions:
            _print_actions(screen, rules)
    for twin in twins():
        print_hanging(screen, f"{twin.reference.__name__}: ", ["a", "whole", "class"], "bold")
        print_hanging(screen, "  defined  ", [twin.reference.__module__])
        print_hanging(screen, "  built    ", _constructor(twin.reference).split())
        print_hanging(screen, "  dtypes   ", twin.dtypes)
        if actions:
            _print_actions(screen, twin.rules)
        else:
            print_hanging(screen, "  actions  ", sorted(twin.rules.actions()))
        if (ranked := twin.over_ranks()) is not None:
            build = ranked.rules.actions()["build"]
            print_hanging(
                screen, "  worlds   ", ", ".join(map(repr, build.choices["ranks"])).split()
            )
        claims = f"({twin.arithmetic}, {', '.join(twin.engines) or 'any engine'})"
        print_hanging(screen, "  class    ", [twin.name, claims])


def _constructor(cls: type) -> str:
    """Arguments and defaults, without types."""
    signature = inspect.signature(cls)
    bare = [row.replace(annotation=row.empty) for row in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def _print_actions(screen: Console, rules: Rules) -> None:
    """Each action with its arguments and the first sentence of its docstring."""
    for name, declared in sorted(rules.actions().items()):
        said = (inspect.getdoc(getattr(type(rules), name)) or "").partition("\n\n")[0]
        head = f"{name}({', '.join(declared.choices)})"
        print_hanging(screen, "    ", [head + ":", *said.split()])
