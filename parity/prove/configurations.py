"""Configurations of a kernel compared with one another, without inputs.

A configuration is a choice of an autotuner, and each kernel of one operation in a file. Each is
traced on names with another one in the place of the reference; those that are proved to have equal
bits for every value are one set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.guarded_memory import GuardedMemory
from twinstep.parity.prove.host_numbers import HostReads
from twinstep.parity.prove.prove import Prover
from twinstep.parity.prove.situations import Situation
from twinstep.parity.prove.torch_names import TorchNames
from twinstep.parity.prove.trace import Tracer
from twinstep.parity.records.proof import PROVED, Verdict
from twinstep.parity.registry.engines import Engine, as_on, engine_for, running
from twinstep.parity.registry.kernels import Kernel
from twinstep.replay.errors import CannotReplay
from twinstep.replay.names.session import Session

Function = Callable[..., object]


@dataclass(frozen=True)
class Configuration:
    """One way to launch.

    Attributes:
        name: of the kernel, and the words of an autotuner's configuration.
        function: the kernel with this choice made.
        engine: where it runs.
    """

    name: str
    function: Function
    engine: Engine


@dataclass
class Sets:
    """Configurations by the bits that they give.

    Attributes:
        members: names of the configurations of each set.
        apart: the verdicts that keep a set from the one before it.
        missing: a reason why nothing was compared.
    """

    members: list[list[str]] = field(default_factory=list)
    apart: list[Verdict] = field(default_factory=list)
    missing: str = ""

    @property
    def words(self) -> str:
        """The result in a sentence."""
        count = sum(map(len, self.members))
        sets = len(self.members)
        if self.missing:
            return f"not compared: {self.missing}"
        noun = "configuration gives" if count == 1 else "configurations give"
        return f"{count} {noun} {sets} set{'s' if sets != 1 else ''} of bits"


@dataclass
class _Twin(Tracer):
    """Traces a kernel with another configuration in the place of the reference.

    Attributes:
        other: that configuration.
    """

    other: Configuration | None = None
    kept: list[GuardedMemory] = field(default_factory=list)

    def _expected(
        self, session: Session, case: Case, lists: dict[str, list[Tensor]], mode: TorchNames
    ) -> Mapping[str, list[Tensor]]:
        """The outputs of the other configuration."""
        assert self.other is not None
        memory = GuardedMemory.of(case, torch.device("cpu"))
        # Memory that is given back would keep its names.
        self.kept.append(memory)
        for span in memory.spans:
            self._name(session, case, span.name, span.index, span.of(memory.block))
        with self._running(memory), mode, HostReads(mode):
            memory.call(as_on(self.other.engine, self.other.function))
        found: dict[str, list[Tensor]] = {}
        for span in memory.spans:
            found.setdefault(span.name, []).append(span.of(memory.block))
        return found


def compare(situation: Situation, configurations: Sequence[Configuration], seconds: float) -> Sets:
    """Put configurations into sets of equal bits; each is compared with the first of each set.

    Args:
        situation: sizes, dtypes and options; values are all.
        configurations: of kernels of one operation.
        seconds: limit of one comparison.
    """
    found = Sets()
    firsts: list[Configuration] = []
    case = situation.case()
    for own in configurations:
        verdict = None
        for first, names in zip(firsts, found.members, strict=True):
            engine = own.engine
            with running(engine) if engine.name == "replay" else nullcontext():
                tracer = _Twin(own.function, engine, other=first)
                verdict = Prover(tracer, [case], seconds).prove()
            if verdict.word == PROVED:
                names.append(own.name)
                break
        else:
            firsts.append(own)
            found.members.append([own.name])
            if verdict is not None:
                found.apart.append(verdict)
    return found


def configurations_of(kernel: Kernel, situation: Situation) -> list[Configuration]:
    """The configurations of a kernel: of each autotuner that a call meets, or one.

    Raises:
        CannotReplay: the engine of the kernel is missing.
    """
    engine = engine_for(kernel)
    if engine.name not in ("replay", "cpu") or engine.missing:
        raise CannotReplay(engine.missing or f"the engine {engine.name}", "engine", "")
    if engine.name == "cpu":
        return [Configuration(kernel.name, kernel.function, engine)]
    met: dict[int, Any] = {}
    with running(engine), _choosing({}, met):
        Tracer(kernel.function, engine).trace(situation.case())
    found = [
        Configuration(f"{kernel.name} ({config})", _chosen(kernel.function, tuner, config), engine)
        for tuner in met.values()
        for config in tuner.configs
    ]
    return found or [Configuration(kernel.name, kernel.function, engine)]


def _chosen(function: Function, tuner: Any, config: Any) -> Function:
    """A kernel whose autotuner takes one configuration."""

    @wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        with _choosing({id(tuner): config}, {}):
            return function(*args, **kwargs)

    return call


@contextmanager
def _choosing(choice: Mapping[int, Any], met: dict[int, Any]) -> Iterator[None]:
    """Let autotuners take the chosen configuration, or else their first, and note them."""
    from triton.runtime.autotuner import Autotuner

    usual = Autotuner.run

    def _run(self: Any, *args: object, **kwargs: object) -> object:
        met[id(self)] = self
        before = self.configs
        self.configs = [choice.get(id(self), before[0])]
        try:
            return usual(self, *args, **kwargs)
        finally:
            self.configs = before

    Autotuner.run = _run
    try:
        yield
    finally:
        Autotuner.run = usual
