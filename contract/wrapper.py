"""An optimizer around an inner one that steps master weights.

Schedulers, step hooks and whatever else takes an optimizer take the wrapper: its `param_groups` and
`state` are those of the inner optimizer, whose parameters are the masters.
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from twinstep.contract.compat import Compat
from twinstep.contract.copies import (
    Parts,
    Rebuilt,
    loading_with_hooks,
    parts_of,
    rebuilt,
    saving_with_hooks,
)
from twinstep.contract.gradient_mark import GradientMark
from twinstep.contract.parallel import Groups
from twinstep.contract.refusals import refuse_norm_of_part
from twinstep.contract.tensors import drop_gradients
from twinstep.contract.timers import Timers
from twinstep.contract.uncompiled import uncompiled

ParamGroup = dict[str, object]
State = dict[str, Tensor]
LOG = logging.getLogger(__name__)


@runtime_checkable
class MomentOptimizer(Protocol):
    """`FusedAdam` or `FusedLamb` of either side: moments and counters, made before a first step."""

    compat: Compat

    def initialize_states(self) -> None:
        """Allocate the state of every parameter that has none; no value changes."""


class Wrapper(torch.optim.Optimizer):
    """An optimizer around a fresh one.

    Args:
        optimizer: without state; its groups are rewritten by the class that derives.
        timers: called by phase, or None.
        split: ranks hold parts of the model.

    `deepcopy` and `pickle` build it anew, with the model's parameters if these are copied with it;
    what is known of the last step, gradients and hooks stay behind, as for torch's optimizers.

    Attributes:
        ranks: groups of all ranks that construct and load alike.
        loads_lists: a state is loaded from a list, with an entry for each rank.

    Raises:
        ValueError: it has state.
        TypeError: it is apex's LAMB, and ranks hold parts of the gradients.
    """

    ranks: Groups = ()
    # Arguments by name, but for the inner optimizer.
    _built_with: Callable[[], Mapping[str, object]]
    # Whether a state dict is one of several, one for each rank.
    loads_lists = False
    # Of the trained parameters, by group.
    _model = "fp16_groups"
    _idle = False
    _inner: torch.optim.Optimizer | None = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        timers: Timers | None = None,
        *,
        split: bool = False,
    ) -> None:
        if optimizer.state:
            raise ValueError(
                f"init_optimizer has state of {len(optimizer.state)} parameters, but should be "
                f"fresh: its parameters become master weights [{type(self).__name__}]"
            )
        if split or self.loads_lists:
            refuse_norm_of_part(optimizer, type(self).__name__)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        super().__init__(params, optimizer.defaults)
        self._inner = optimizer
        self._mark = GradientMark()
        self.timers = timers

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        hooked: dict[str, Callable[..., Any]] = {
            "state_dict": saving_with_hooks,
            "load_state_dict": loading_with_hooks,
            "step": uncompiled,
        }
        for name in hooked.keys() & vars(cls).keys():
            setattr(cls, name, hooked[name](vars(cls)[name]))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer."""
        return self._held()

    def _agree(self) -> None:
        """Compare with other ranks what all should have alike; called at the end of construction.

        Raises:
            ValueError: something differs.
        """

    def _half(self) -> torch.dtype | None:
        """The dtype that masters are for; None for any."""
        return None

    def _trained(self) -> Iterable[Tensor]:
        return chain.from_iterable(getattr(self, self._model))

    def _name_unneeded(self) -> None:
        """Log that masters are of no use; called at the end of construction."""
        half, params = self._half(), list(self._trained())
        if half and params and all(param.dtype is not half for param in params):
            LOG.warning(
                "no parameter is %s, but some should be, or masters are copies of no use: "
                "model.to(%s) belongs before this optimizer [%s]",
                *(half, half, type(self).__name__),
            )

    def _name_idle_step(self, params: Iterable[Tensor]) -> None:
        """Log once that none of these has a gradient in a step."""
        if not self._idle and all(param.grad is None for param in params):
            self._idle = True
            LOG.warning(
                "no parameter has a gradient, but some should: this step decays weights and is "
                "counted, as in DeepSpeed; call optimizer.backward(loss) before it [%s.step, said "
                "once]",
                type(self).__name__,
            )

    def _held(self) -> torch.optim.Optimizer:
        assert self._inner is not None
        return self._inner

    @property
    def param_groups(self) -> list[ParamGroup]:
        """Groups of the inner optimizer, whose parameters are masters."""
        return [] if self._inner is None else self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[ParamGroup]) -> None:
        # torch's constructor assigns before there is an inner optimizer.
        if self._inner is not None:
            self._inner.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, State]:
        """State of the inner optimizer, by master."""
        refuse_named_state(type(self).__name__)
        return defaultdict(dict) if self._inner is None else self._inner.state

    @state.setter
    def state(self, state: defaultdict[Tensor, State]) -> None:
        if self._inner is not None:
            self._inner.state = state

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Refused: masters are laid out at construction."""
        if self._inner is not None:
            raise RuntimeError(
                "a group was added, but all groups should be there at construction, when masters "
                f"are laid out [{type(self).__name__}]"
            )

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        """The learning rate of the first group."""
        return cast(float, self.param_groups[0]["lr"])

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # What `GradScaler.step` asks first.
        raise RuntimeError(
            "a GradScaler steps this optimizer, but should not: it has masters of its own, and a "
            "loss scale where one is needed; call optimizer.backward(loss) and optimizer.step()"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__} around {self._inner!r}"

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., Rebuilt], Parts]:
        return rebuilt, parts_of(self, getattr(self, self._model), self._kept())

    def __copy__(self) -> Wrapper:
        # Two that are built around the same parameters would lay them out twice.
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def _kept(self) -> dict[str, object]:
        """What a copy has beside a state dict."""
        return {}

    def _enter_copied(self, state: object, kept: Mapping[str, object]) -> None:
        """Take over the state dict of the optimizer that this one is a copy of."""
        self.load_state_dict(cast(Any, state))
        for name, value in kept.items():
            setattr(self, name, value)

    def _refuse(self, closure: object) -> None:
        if closure is not None:
            raise RuntimeError(
                "a closure was given, but should not be: backward is this optimizer's, and a "
                "skipped step could not take it back; Lightning gives one by itself, but for "
                f"self.optimizers(use_pl_optimizer=False) [{type(self).__name__}.step]"
            )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        timer = None if self.timers is None else self.timers(name)
        if timer is not None:
            timer.start()
        try:
            yield
        finally:
            # A phase that fails has ended, too.
            if timer is not None:
                timer.stop()

    def _bytes(self, **tensors: Iterable[Tensor | None]) -> dict[str, int]:
        """Bytes by kind; the state of the inner optimizer is a kind of its own."""
        inner = (value for held in self.state.values() for value in held.values())
        kinds = {**tensors, "optimizer_state": (t for t in inner if isinstance(t, Tensor))}
        return {
            kind: sum(tensor.nbytes for tensor in held if tensor is not None)
            for kind, held in kinds.items()
        }


def refuse_named_state(where: str) -> None:
    """Refuse to let `torch.distributed.checkpoint` look for state by name; called by a getter.

    Without state it would take a first step itself, with gradients that are accumulated.

    Raises:
        RuntimeError: the getter is called from there.
    """
    caller = sys._getframe(2).f_globals.get("__name__")
    if caller == "torch.distributed.checkpoint.state_dict":
        raise RuntimeError(
            "state was asked for by names of the model's parameters, but should be taken and "
            f"loaded by state_dict() and load_state_dict(): masters have no names [{where}]"
        )


def initialize(optimizer: torch.optim.Optimizer, masters: Sequence[Tensor], compat: Compat) -> None:
    """Allocate the state of all masters.

    No value changes: moments are zero and counters are 0, as before a first step. An optimizer
    that is not ours allocates when it first steps, and is left alone. With
    `compat.step_at_construction` a whole step with zero gradients is taken instead (edge FP-1): it
    decays masters, and counters become 1.

    Args:
        optimizer: whose parameters are the masters.
        masters: written with the compat field alone.
        compat: see above.
    """
    if compat.step_at_construction:
        for master in masters:
            master.grad = torch.zeros_like(master)
        optimizer.step()
        drop_gradients(masters)
    elif isinstance(optimizer, MomentOptimizer):
        optimizer.initialize_states()
