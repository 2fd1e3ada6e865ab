"""Other projects' ways to do an operation, on the same tensors.

A peer does the whole of the operation: where an optimizer wants gradients as wide as the weights,
or leaves no low-precision copy, the casts are part of its time. What is not installed, or does not
run on the device, is absent with a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch
from torch.nn import Parameter

from twinstep.benchmarks.beside.subject import Arguments

Call = Callable[[], object]
Hyper = dict[str, Any]


class Stepping(Protocol):
    """An optimizer, as far as it is used here."""

    def step(self) -> object:
        """Take a step."""


class Absent(Exception):
    """A peer cannot be timed here; the message is the reason."""


@dataclass(frozen=True)
class Peer:
    """A way to do an operation.

    Attributes:
        name: as the table shows it.
        package: whose version stands beside the name.
        operations: that it does.
        make: prepares it for some arguments.
        device: the kind of device it needs; empty for any.
    """

    name: str
    package: str
    operations: tuple[str, ...]
    make: Callable[[Arguments], Call]
    device: str = ""

    def version(self) -> str:
        """Name and version of its package.

        Raises:
            Absent: the package is not installed.
        """
        return version_of(self.package)


def version_of(package: str) -> str:
    """Name and version of a package.

    Raises:
        Absent: it is not installed.
    """
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        raise Absent(f"{package} is not installed") from None


def peers_of(operation: str, device: torch.device) -> list[Peer]:
    """Peers that do an operation on that kind of device, installed or not."""
    return [
        peer for peer in PEERS if operation in peer.operations and peer.device in ("", device.type)
    ]


def stepped(make: Callable[[list[Parameter]], Stepping], given: Arguments) -> Call:
    """One step of an optimizer: casts of gradients, the step, low-precision copies."""
    params = [Parameter(tensor) for tensor in given.lists["params"]]
    grads, copies = given.lists["grads"], given.lists.get("copies", [])
    narrow = any(p.dtype != g.dtype for p, g in zip(params, grads, strict=True))
    wide = [torch.empty_like(param) for param in params] if narrow else grads
    for param, grad in zip(params, wide, strict=True):
        param.grad = grad
    optimizer = make(params)
    weights = [param.detach() for param in params]

    def call() -> None:
        if narrow:
            torch._foreach_copy_(wide, grads)
        optimizer.step()
        if copies:
            torch._foreach_copy_(copies, weights)

    return call


def torch_adam(given: Arguments, **how: bool) -> Call:
    """Torch's Adam or AdamW with the operation's hyper-parameters."""
    decoupled = given.operation.name == "adamw_step"
    cls: Any = torch.optim.AdamW if decoupled else torch.optim.Adam
    return stepped(lambda params: cls(params, **hyper(given), **how), given)


def hyper(given: Arguments) -> Hyper:
    """Hyper-parameters of Adam under the names that all projects share."""
    value = {name: float(control) for name, control in given.controls.items()}
    betas = (value["beta1"], value["beta2"])
    return {
        "lr": value["lr"],
        "betas": betas,
        "eps": value["eps"],
        "weight_decay": value["weight_decay"],
    }


def torch_sgd(given: Arguments, **how: bool) -> Call:
    """Torch's SGD with momentum."""
    momentum = float(given.controls["momentum"])
    cls: Any = torch.optim.SGD
    return stepped(lambda params: cls(params, lr=1e-3, momentum=momentum, **how), given)


def foreign_adam(given: Arguments, module: str, name: str, decoupled: str) -> Call:
    """Adam of another project; `decoupled` is its name for AdamW's weight decay."""
    cls: Any = getattr(import_module(module), name)
    flag = {decoupled: given.operation.name == "adamw_step"} if decoupled else {}
    return stepped(lambda params: cls(params, **hyper(given), **flag), given)


def foreach_norm(given: Arguments) -> Call:
    """The norm as `clip_grad_norm_` takes it."""
    grads = given.lists["grads"]
    return lambda: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2.0)))


def loop_norm(given: Arguments) -> Call:
    """The norm of norms, tensor by tensor, in fp32."""
    grads, wide = given.lists["grads"], torch.float32
    return lambda: torch.stack([torch.linalg.vector_norm(g, dtype=wide) for g in grads]).norm()


def amp_unscale(given: Arguments) -> Call:
    """The kernel of torch's GradScaler."""
    grads, found = given.lists["grads"], torch.zeros_like(given.controls["found_inf"])
    inverse = given.controls["inv_scale"].float()
    unscale = torch._amp_foreach_non_finite_check_and_unscale_
    return lambda: unscale(grads, found, inverse)


def foreach_add(given: Arguments) -> Call:
    """Sums by one operator over all tensors."""
    sums, grads = given.lists["accumulators"], given.lists["grads"]
    return lambda: torch._foreach_add_(sums, grads)


def loop_add(given: Arguments) -> Call:
    """Sums tensor by tensor."""
    pairs = list(zip(given.lists["accumulators"], given.lists["grads"], strict=True))
    return lambda: [total.add_(grad) for total, grad in pairs]


def foreach_cast(given: Arguments) -> Call:
    """Casts by one operator over all tensors."""
    copies, sources = given.lists["copies"], given.lists["sources"]
    return lambda: torch._foreach_copy_(copies, sources)


def flattened(given: Arguments) -> Call:
    """Torch's own flattening.

    Raises:
        Absent: of one tensor it makes a view.
    """
    tensors = given.lists["tensors"]
    if len(tensors) == 1:
        raise Absent("of one tensor it makes a view, not a copy")
    flatten: Any = torch._utils._flatten_dense_tensors
    return lambda: flatten(tensors)


ADAM, TORCH = ("adam_step", "adamw_step"), "torch"
PEERS = (
    Peer("torch fused", TORCH, ADAM, partial(torch_adam, fused=True)),
    Peer("torch foreach", TORCH, ADAM, partial(torch_adam, foreach=True)),
    Peer("torch loop", TORCH, ADAM, partial(torch_adam, foreach=False)),
    Peer(
        "DeepSpeedCPUAdam",
        "deepspeed",
        ADAM,
        partial(
            foreign_adam,
            module="twinstep.benchmarks.beside.builds",
            name="cpu_adam",
            decoupled="adamw_mode",
        ),
        "cpu",
    ),
    Peer(
        "DeepSpeed FusedAdam",
        "deepspeed",
        ADAM,
        partial(
            foreign_adam, module="deepspeed.ops.adam", name="FusedAdam", decoupled="adam_w_mode"
        ),
        "cuda",
    ),
    Peer(
        "apex FusedAdam",
        "apex",
        ADAM,
        partial(foreign_adam, module="apex.optimizers", name="FusedAdam", decoupled="adam_w_mode"),
        "cuda",
    ),
    Peer(
        "optimi AdamW",
        "torch-optimi",
        ("adamw_step",),
        partial(foreign_adam, module="optimi", name="AdamW", decoupled=""),
    ),
    Peer("torch fused", TORCH, ("sgd_step",), partial(torch_sgd, fused=True)),
    Peer("torch foreach", TORCH, ("sgd_step",), partial(torch_sgd, foreach=True)),
    Peer("torch foreach", TORCH, ("global_norm",), foreach_norm),
    Peer("torch loop", TORCH, ("global_norm",), loop_norm),
    Peer("torch GradScaler", TORCH, ("unscale",), amp_unscale),
    Peer("torch foreach", TORCH, ("accumulate",), foreach_add),
    Peer("torch loop", TORCH, ("accumulate",), loop_add),
    Peer("torch foreach", TORCH, ("cast_copy",), foreach_cast),
    Peer("torch", TORCH, ("flatten",), flattened),
)
