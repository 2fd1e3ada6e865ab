"""All peers."""

from __future__ import annotations

from twinstep.parity.proof.peers import (
    deepspeed_adam,
    deepspeed_norm,
    deepspeed_scale,
    torch_amp,
    torch_optim,
)
from twinstep.parity.proof.peers.peer import Peer
from twinstep.parity.records.errors import UsageError

# What compiles itself comes last: it is compiled while the others are judged.
MODULES = (torch_optim, torch_amp, deepspeed_scale, deepspeed_norm, deepspeed_adam)


def peers(package: str | None = None) -> list[Peer]:
    """Every peer, or those of one package.

    Raises:
        UsageError: no peer is of that package.
    """
    every = [peer for module in MODULES for peer in module.SHELF]
    known = sorted({peer.package for peer in every})
    if package is not None and package not in known:
        raise UsageError(f'--package "{package}" is unknown, but should be among {known}')
    return [peer for peer in every if package in (None, peer.package)]
