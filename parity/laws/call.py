"""One call of the kernel as a law asks for it, and the state after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from twinstep.parity.cases.case import Case
from twinstep.parity.cases.guarded_memory import GuardedMemory, Span
from twinstep.parity.expected.accepted import Accepted
from twinstep.parity.expected.formula import Formulated
from twinstep.parity.expected.outputs import AcceptedOutputs


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of the kernel.

    Attributes:
        case: its arguments.
        reuse: an earlier call in whose memory this one works, its case lying alike; None for own.
        moved: tensors that lie at other addresses than in the call that is reused, as
            `moved_among` reads each; the same ones in all calls that reuse it.
        fresh: make the call even where another law has made it already.
        may_refuse: an exception is accepted that names the reason and leaves every byte unchanged.
        watched: note what the host reads of the device meanwhile.
        captured: capture the call as a CUDA graph, fill its memory again, and replay the graph.
        lifted: evaluate the kernel's formula in float64 beside it.
        guarded: look for changes of the process's state, and for tensors that are kept alive.
        turned: switches of the process are not as a new process has them.
        races: on replay, let two threads that touch the same bytes without order be an error.
        schedule: on replay, order of the blocks: `one by one`, `backwards`, `permuted`.
        garbage: content of what the kernel allocates without values, one of `GARBAGE`.
        end: in tensors larger than 2³¹ elements, where to look (see `LargePlaces`).
    """

    case: Case
    reuse: int | None = None
    moved: tuple[str, ...] = ()
    fresh: bool = False
    may_refuse: bool = False
    watched: bool = False
    captured: bool = False
    lifted: bool = False
    guarded: bool = False
    turned: bool = False
    races: bool = False
    schedule: str = ""
    garbage: str = ""
    end: str = ""

    @property
    def plain(self) -> bool:
        """True if its outcome may serve another law."""
        own = self.fresh or self.watched or self.lifted or self.guarded
        return self.portable and not own and self.reuse is None

    @property
    def portable(self) -> bool:
        """True if a stand-alone file can make it."""
        return not (self.captured or self.races or self.schedule or self.garbage or self.end)


@dataclass(frozen=True)
class Outcome:
    """The state after one call.

    Attributes:
        memory: where it worked.
        before: the bytes it found.
        after: the bytes it left.
        accepted: by the reference, for everything written.
        evaluated: whether the reference was; otherwise `accepted` holds placeholders.
        reads: device values that the host read meanwhile, if that was watched.
        refused: the exception with which the call was refused; empty if it was made.
        formulas: specification and lifted formula of what was written, if the call was lifted.
        changed: sentences on what is different in the process after the call.
        keeps: after a guarded call, number of tensors, bytes, threads and processes that are left.
        remark: what may be the cause of a violation in this call; empty if nothing is known.
    """

    memory: GuardedMemory
    before: Tensor
    after: Tensor
    accepted: AcceptedOutputs
    evaluated: bool = False
    reads: tuple[str, ...] = ()
    refused: str = ""
    formulas: tuple[Formulated, ...] = ()
    changed: tuple[str, ...] = ()
    keeps: Mapping[str, int] = field(default_factory=dict)
    remark: str = ""

    def got(self, span: Span) -> Tensor:
        """The tensor after the call."""
        return span.of(self.after)

    def results(self) -> dict[tuple[str, int], Tensor]:
        """Everything the operation writes, after the call."""
        return {(span.name, span.index): self.got(span) for span, _ in self.written()}

    def written(self) -> list[tuple[Span, Accepted]]:
        """Everything the operation writes, with what should be there."""
        names = self.memory.case.operation.writes
        spans = [span for span in self.memory.spans if span.name in names]
        return [(span, self.accepted[span.name][span.index]) for span in spans]
