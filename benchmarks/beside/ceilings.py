"""Limits of memory: plain passes that move as many bytes, timed in the same rounds.

A kernel that updates tensors in place reads and writes the same lines. A copy to other memory lets
a CPU read what it is about to overwrite, so a pass in place is the higher ceiling there; on a GPU
they are alike. Where writing costs more than reading, who reads twice what is written has a higher
ceiling still. The fastest of the passes counts.
"""

from __future__ import annotations

import torch

from twinstep.benchmarks.beside.subject import Subject

MOSTLY_READ = 1.5  # bytes read for each that is written, from which on a sum is the fairer pass


def ceilings(read: int, written: int, device: torch.device) -> dict[str, Subject]:
    """Passes that move as many bytes as a kernel reads and writes, in fp32."""
    moved, found = read + written, dict[str, Subject]()
    if not written:
        source = filled(moved // 4, device)
        return {"read": Subject(lambda: source.sum(), _nothing, device)}
    source, target = filled(moved // 8, device), filled(moved // 8, device)
    found["copy"] = Subject(lambda: target.copy_(source), _nothing, device)
    found["in place"] = Subject(lambda: source.neg_(), _nothing, device)
    if read >= MOSTLY_READ * written:
        total, part = filled(moved // 12, device), torch.zeros(max(1, moved // 12), device=device)
        found["sum in place"] = Subject(lambda: total.add_(part), _nothing, device)
    return found


def filled(count: int, device: torch.device) -> torch.Tensor:
    """Ordinary numbers."""
    return torch.full((max(1, count),), 0.5, device=device)


def _nothing() -> None:
    """Nothing: a pass leaves what it found."""
