"""Limits of memory: plain passes that move as many bytes, timed in the same rounds.

A kernel that updates tensors in place reads and writes the same lines. A copy to other memory lets
a CPU read what it is about to overwrite, so the pass in place is the higher ceiling there; on a GPU
they are alike. The fastest of the passes that move the same kind of bytes counts.
"""

from __future__ import annotations

import torch

from twinstep.benchmarks.beside.subject import Subject


def ceilings(moved: int, writes: bool, device: torch.device) -> dict[str, Subject]:
    """Passes that move that many bytes; those that only read, where the kernel only reads."""
    half = max(1, moved // 8)
    source = torch.full((half if writes else 2 * half,), 0.5, device=device)
    found: dict[str, Subject] = {}
    if writes:
        target = torch.empty_like(source)
        found["copy"] = Subject(lambda: target.copy_(source), _nothing, device)
        found["in place"] = Subject(lambda: source.neg_(), _nothing, device)
    else:
        found["read"] = Subject(lambda: source.sum(), _nothing, device)
    return found


def _nothing() -> None:
    """Nothing: a pass leaves what it found."""
