"""Search for the worst error: breed the elements that came closest to their bound.

Random cases stay far from a bound, because all roundings of a formula must go the same way.
The elements of a case are independent tries with the same controls, so one case is a whole
generation: those with the largest error over bound stay, the others become their offspring, with
some low bits changed. A result of few bits shows no error except beside a tie, and there being
near to one counts a little (`Accepted.nearness`).

What has one result for all elements (a norm) has no elements to breed: there a tenth of the
elements changes at a time, and the better case stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinstep.parity.cases.case import Case, is_counter
from twinstep.parity.cases.formats import FORMATS, widened
from twinstep.parity.operations.operation import Role
from twinstep.parity.runner.run_plan import Scores

ELEMENTS = 1024
PARENTS = 32
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class _Best:
    """The case in which one output came closest to its bound, and the scores of that output."""

    peak: float
    index: int
    case: Case
    scores: Mapping[int, Tensor]


@dataclass
class ErrorSearch:
    """Remembers the best case for each output and makes the next generation of one of them.

    Attributes:
        seed: of the changes.
    """

    seed: int = 0
    best: dict[str, _Best] = field(default_factory=dict)
    generation: int = 0

    def __post_init__(self) -> None:
        self.dice = np.random.default_rng(self.seed)

    def see(self, case: Case, scores: Scores) -> None:
        """Take note of a case that was judged and accepted."""
        for name in dict.fromkeys(name for name, _ in scores):
            own = {index: score for (n, index), score in scores.items() if n == name}
            peaks = {index: float(s.max()) for index, s in own.items() if s.numel()}
            if not peaks:
                continue
            index = max(peaks, key=peaks.__getitem__)
            known = self.best.get(name)
            # Among equals the younger: it has come some way from the others.
            if known is None or peaks[index] >= known.peak > 0 or known.peak == 0:
                self.best[name] = _Best(peaks[index], index, case, own)

    def next(self) -> Case | None:
        """The next case to judge; None if no output has a bound."""
        if not self.best:
            return None
        names = sorted(self.best)
        name = names[self.generation % len(names)]
        self.generation += 1
        chosen = self.best[name]
        if _elementwise(chosen.case, name, chosen.scores):
            return _offspring(chosen.case, chosen.index, chosen.scores[chosen.index], self.dice)
        return _changed(chosen.case, self.dice)


def _offspring(case: Case, index: int, score: Tensor, dice: np.random.Generator) -> Case:
    """One tensor at each position: the best elements and their changed copies."""
    parents = torch.topk(score, min(PARENTS, score.numel())).indices.numpy()
    chosen = np.concatenate([parents, dice.choice(parents, ELEMENTS - len(parents))])
    lists: dict[str, list[Tensor]] = {}
    for argument in case.operation.lists:
        tensors = case.lists[argument.name]
        if not tensors:
            lists[argument.name] = []
            continue
        tensor = tensors[index]
        if not is_counter(tensor):
            tensor = tensor.reshape(-1)[torch.from_numpy(chosen)]
        if tensor.is_floating_point():
            tensor = _mutated(tensor, len(parents), argument.role, dice)
        lists[argument.name] = [tensor]
    return case.with_lists(lists)


def _elementwise(case: Case, name: str, scores: Mapping[int, Tensor]) -> bool:
    """Whether the output has a score for each element of the lists beside it."""
    operation = case.operation
    together = operation.shaped or any(argument.single for argument in operation.lists)
    if name not in case.lists or together:
        return False
    firsts = case.lists[case.operation.lists[0].name]
    return all(score.numel() == firsts[at].numel() for at, score in scores.items())


def _mutated(bred: Tensor, fixed: int, role: Role, dice: np.random.Generator) -> Tensor:
    """Change some low bits of some elements after the first `fixed`; all stay finite."""
    form = FORMATS[bred.dtype]
    bits = bred.contiguous().view(form.signed).numpy().astype(np.int64)
    reach = dice.integers(0, form.width // 2 + 4, bits.size)
    change = dice.integers(0, 1 << 30, bits.size) % (np.int64(1) << reach)
    change[dice.random(bits.size) < 0.4] = 0
    change[:fixed] = 0
    # Magnitude bits only: the sign is part of what made the parent good.
    mutant = (bits ^ change).astype(f"i{form.width // 8}")
    result = torch.from_numpy(mutant).view(bred.dtype)
    keep = ~torch.isfinite(widened(result))
    if role is Role.SQUARE:
        keep |= result < 0
    return torch.where(keep, bred, result)


def _changed(case: Case, dice: np.random.Generator) -> Case:
    """The case with a tenth of its floating-point elements changed in some bits."""
    lists = {}
    for argument in case.operation.lists:
        tensors: list[Tensor] = []
        for tensor in case.lists[argument.name]:
            if not tensor.is_floating_point() or not tensor.numel():
                tensors.append(tensor)
                continue
            mutant = _mutated(tensor.reshape(-1), 0, argument.role, dice).view(tensor.shape)
            some = torch.from_numpy(dice.random(tensor.numel()) < 0.1).view(tensor.shape)
            tensors.append(torch.where(some, mutant, tensor))
        lists[argument.name] = tensors
    return case.with_lists(lists)
