"""Keywords and group options of torch's optimizers, beside those that a class has of its own.

`foreach`, `fused` and `capturable` choose between ways to the same step. There is one way here, so
that any value is taken. The others change the step, and are refused when they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping

from twinstep.contract.errors import in_words

WAYS = ("foreach", "fused", "capturable")
REASONS = {
    "amsgrad": "there is no running maximum of the second moment",
    "maximize": "negate the loss instead",
    "differentiable": "autograd cannot follow an update in place",
}
# Keywords of apex's LAMB, which is another class here; NVLAMB is one of its choices.
APEX_LAMB = ("use_nvlamb", "grad_averaging", "adam_w_mode", "set_grad_none")


def check_keywords(where: str, given: Mapping[str, object], amsgrad: bool) -> None:
    """Require that keywords of torch's optimizers ask for nothing that is missing here.

    Args:
        where: the class, for messages.
        given: by name; False and None ask for nothing.
        amsgrad: a keyword that classes here have by name.

    Raises:
        RuntimeError: one of REASONS is asked for, or both `foreach` and `fused` are, or LAMB is
            given a keyword of apex's.
        TypeError: torch's Adam has no such keyword.
    """
    for name in given:
        if where == "FusedLamb" and name in APEX_LAMB:
            raise RuntimeError(
                f"{name} was given, but should not be: this is DeepSpeed's LAMB, and apex's with "
                f"NVLAMB is FusedLAMB [{where}]"
            )
        if name not in (*REASONS, *WAYS):
            raise TypeError(f"{where} got an unexpected keyword argument '{name}'")
    refuse_asked({"amsgrad": amsgrad, **given}, where)
    if given.get("foreach") and given.get("fused"):
        raise RuntimeError(
            f"`fused` and `foreach` cannot be `True` together, but should be one or none [{where}]"
        )


def refuse_asked(options: Mapping[str, object], where: str) -> None:
    """Refuse options that change a step in a way that no class here has.

    Raises:
        RuntimeError: one is asked for.
    """
    for name, reason in REASONS.items():
        if options.get(name):
            value = in_words(options[name])
            raise RuntimeError(f"{name}={value}, but should be False: {reason} [{where}]")


def refuse_step_arguments(given: Mapping[str, object], where: str) -> None:
    """Refuse the arguments that apex's Adam once took beside a closure.

    Raises:
        RuntimeError: one of them is given.
        TypeError: an argument has another name.
    """
    for name, value in given.items():
        if name not in ("grads", "output_params", "scale", "grad_norms", "grad_scaler"):
            raise TypeError(f"{where} got an unexpected keyword argument '{name}'")
        if value is not None:
            raise RuntimeError(
                f"{name} was given, but should not be: gradients are those of the parameters, "
                f"unscaled, as in apex since its new interface [{where}]"
            )
