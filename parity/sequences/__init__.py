"""Whole optimizer classes judged against a reference class, by random sequences of actions.

    @register_optimizer("my_adam", reference="FusedAdam", arithmetic="exact")
    class MyAdam(torch.optim.Optimizer): ...

Both classes are driven by the same actions (fill gradients, step, change a hyper-parameter, save,
load, copy, ...), and after every action everything that can be seen of them is compared: every
tensor reachable from the optimizer with its bits and what shares memory with it, hyper-parameters,
counters. A failing sequence is shrunk and becomes one stand-alone file. What can be done is
declared by a rule set; `docs/guide/adding-an-optimizer.md` has examples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinstep.parity.sequences.actions import Rules, action
    from twinstep.parity.sequences.adam_rules import AdamRules, LenientAdamRules
    from twinstep.parity.sequences.registry import Twin, register_optimizer
    from twinstep.parity.sequences.rules import OptimizerRules
    from twinstep.parity.sequences.world import World

_HOMES = {
    "AdamRules": "adam_rules",
    "LenientAdamRules": "adam_rules",
    "OptimizerRules": "rules",
    "Rules": "actions",
    "Twin": "registry",
    "World": "world",
    "action": "actions",
    "register_optimizer": "registry",
}

__all__ = [
    "AdamRules",
    "LenientAdamRules",
    "OptimizerRules",
    "Rules",
    "Twin",
    "World",
    "action",
    "register_optimizer",
]


def __getattr__(name: str) -> object:
    """Import public names when they are first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'twinstep.parity.sequences' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"twinstep.parity.sequences.{_HOMES[name]}"), name)
