"""FusedAdam: Adam and AdamW as an ordinary `torch.optim.Optimizer`, in Triton.

A step prepares coefficients and counters in one launch for each group and device, and updates in
one launch for each dtype combination; it never waits for the GPU. Numbers reach the device through
a control block, and only when they have changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast, overload

import torch
from torch import Tensor

from twinstep.contract.checkpoint.plain import loading_as_stored
from twinstep.contract.compat import CORRECT, Compat, moment_dtype
from twinstep.contract.hyper import Number, check_adam
from twinstep.contract.keywords import check_keywords, refuse_asked, refuse_step_arguments
from twinstep.contract.moments import (
    MOMENTS,
    StateDict,
    check_added_group,
    new_state,
)
from twinstep.contract.shards import check_gradient_shards, local_of
from twinstep.contract.tensors import FLOATS, check_dense_gradients
from twinstep.contract.uncompiled import uncompiled
from twinstep.contract.wrapper import ParamGroup
from twinstep.fast.kernels.adam import prepare_adam, update_adam
from twinstep.fast.runtime.checks import require_not_captured
from twinstep.fast.runtime.control import GroupBlock
from twinstep.fast.runtime.lists import FixedLists, FixedTensors, Layout
from twinstep.fast.runtime.strides import contiguous_lists
from twinstep.fast.runtime.tables import TableCache
from twinstep.fast.runtime.watch import Found, GradientReader, StateWatch, gradient, same

KEPT = ("adam_w_mode", "set_grad_none", "compat")  # attributes that a pickle carries
WRITTEN = (0, 2, 3)  # parameters and both moments, among the lists of an update


class FusedAdam(torch.optim.Optimizer):
    """Adam (L2 weight decay) or AdamW (decoupled weight decay).

    Args:
        params: parameters or groups of them; fp16, bf16 and fp32 may be mixed.
        lr: learning rate, a number or a 0-dim tensor like betas, eps and weight_decay. A float64
            tensor on the parameters' device is read there, by captured graphs too.
        bias_correction: divide the moments by 1 - beta^t.
        betas: decay of the first and the second moment.
        eps: added outside the square root.
        adam_w_mode: True for AdamW, False for Adam with L2 decay; for the whole instance.
        weight_decay: of either sign.
        amsgrad: refused unless False.
        set_grad_none: what `zero_grad()` does unless told.
        compat: upstream behaviour to reproduce.
        torchs: keywords of torch's optimizers; `foreach`, `fused` and `capturable` change nothing,
            `maximize` and `differentiable` are refused unless False.

    State of a parameter: `step` (int64, shape ()), `exp_avg`, `exp_avg_sq` (fp32, shaped like the
    parameter). A parameter without a gradient keeps all of it. Parameters that are not contiguous
    are updated in place where they are dense, and through a copy otherwise.

    Source: Kingma & Ba (2015), algorithm 1; Loshchilov & Hutter (2019), algorithm 2.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[ParamGroup],
        lr: Number = 1e-3,
        *,
        bias_correction: bool = True,
        betas: tuple[Number, Number] = (0.9, 0.999),
        eps: Number = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: Number = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        compat: Compat = CORRECT,
        **torchs: object,
    ) -> None:
        check_keywords("FusedAdam", torchs, amsgrad)
        self.adam_w_mode, self.set_grad_none = bool(adam_w_mode), bool(set_grad_none)
        self.compat = compat
        self._forget_device()
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas}
        super().__init__(params, {**defaults, "eps": eps, "weight_decay": weight_decay})

    def _forget_device(self) -> None:
        self._blocks: dict[tuple[int, torch.device], GroupBlock] = {}
        self._fixed: defaultdict[tuple[object, ...], FixedLists] = defaultdict(FixedLists)
        self._cache = TableCache(limit=64)
        self._plan: _Plan | None = None

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group; what it does not say comes from the constructor.

        Raises:
            TypeError: a hyper-parameter is no number.
            RuntimeError: the group asks for what a keyword of the constructor may not.
            ValueError: a hyper-parameter is out of range, or a parameter is not fp16, bf16 or fp32
                or overlaps itself. Nothing has been added.
        """
        check_adam(self.defaults | param_group, "FusedAdam")
        refuse_asked(param_group, "FusedAdam")
        super().add_param_group(param_group)
        check_added_group(self, shards=True)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop (True) or zero (False) all gradients; None does what `set_grad_none` says."""
        drop = set_to_none if set_to_none is not None else self.set_grad_none
        super().zero_grad(set_to_none=drop)

    @overload
    def step(self, closure: None = None, **legacy: object) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], **legacy: object) -> float: ...

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, **legacy: object) -> float | None:
        """Take one step; writes parameters, moments and counters in place.

        Args:
            closure: evaluates the loss again, with gradients enabled.
            legacy: refused, the arguments that apex's Adam once took.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: an argument of apex is given, a gradient is sparse, or nothing here can
                run kernels on the parameters'
                device. Nothing has been written.
        """
        if legacy:
            refuse_step_arguments(legacy, "FusedAdam.step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = None if self._plan is None else self._plan.read(self)
        if self._plan is None or found is None:
            self._plan = _Plan(self)
            found = self._plan.read(self)
            assert found is not None
        for part in self._plan.parts:
            self._update(part, found)
        return loss

    def _block(self, part: _Part) -> GroupBlock:
        key = (part.index, part.device)
        if key not in self._blocks:
            self._blocks[key] = GroupBlock(part.device, lamb=False)
        self._blocks[key].set_group(self.param_groups[part.index])
        return self._blocks[key]

    def _update(self, part: _Part, found: Found) -> None:
        """Advance the counters of a part and update its parameters with their corrections."""
        block = self._block(part)
        coefficients = prepare_adam(
            part.steps,
            [*block.hyper(), block["factor"], block["found_inf"]],
            bias_correction=bool(self.param_groups[part.index]["bias_correction"]),
            cache=self._cache,
        )
        weights, *moments = part.lists
        grads = found.moving(part.places, part.layout)
        with contiguous_lists([weights, grads, *moments], WRITTEN) as lanes:
            update_adam(
                lanes,
                coefficients,
                decoupled=self.adam_w_mode,
                cache=self._cache,
                shared=len(part.steps) == 1,
            )

    def initialize_states(self) -> None:
        """Make the state of parameters that have not been stepped yet; values stay as they are."""
        for param in (p for group in self.param_groups for p in group["params"]):
            self.state[param] = self.state[param] or self._new_state(param)

    def _state_of(self, param: Tensor) -> dict[str, Tensor]:
        """State of a parameter; new where it has none."""
        if not self.state[param]:
            require_not_captured("FusedAdam", param.device)
            self.state[param] = self._new_state(param)
        return cast("dict[str, Tensor]", self.state[param])

    def _new_state(self, param: Tensor) -> dict[str, Tensor]:
        return new_state(param, moment_dtype(self.compat, param.dtype))

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state; moments keep their precision, counters become integers. All is copied.

        Raises:
            ValueError: a counter is not a whole number of steps, or groups do not match.
        """
        with loading_as_stored(self, self._new_state):
            super().load_state_dict(state_dict)
        self._fixed.clear()
        self._plan = None

    def __getstate__(self) -> StateDict:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in KEPT}}

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)
        self._forget_device()


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Parameters of one group on one device that are updated together.

    Attributes:
        index: of the group.
        device: of the parameters.
        places: of their gradients among those of all groups.
        lists: parameters, first and second moments.
        layout: of the gradients; None where one is not contiguous.
        steps: counters that advance; one for all, or one for each.
    """

    index: int
    device: torch.device
    places: slice | list[int]
    lists: list[FixedTensors]
    layout: Layout | None
    steps: FixedTensors


class _Plan:
    """A step, but for the addresses of gradients and the values of hyper-parameters.

    Attributes:
        parts: updates in the order of their launches.
    """

    def __init__(self, optimizer: FusedAdam) -> None:
        self._params = [list(group["params"]) for group in optimizer.param_groups]
        self._shared = optimizer.compat.shared_step_counter
        everything = list(chain(*self._params))
        check_dense_gradients(everything, "FusedAdam.step")
        # Of a DTensor this rank's part is stepped, with its part of the gradient.
        self._parts_of = {local_of(param): param for param in everything}
        self._dtensors = [param for part, param in self._parts_of.items() if part is not param]
        self._lend_gradients()
        self._reader = GradientReader(list(self._parts_of))
        self.parts: list[_Part] = []
        for (index, device), places in self._by_device().items():
            self._add(optimizer, index, device, places)
        self._state = StateWatch(optimizer.state, ("step", *MOMENTS))

    def _by_device(self) -> dict[tuple[int, torch.device], list[int]]:
        """Places of parameters that have a gradient, for each group and device."""
        found: dict[tuple[int, torch.device], list[int]] = {}
        place = 0
        for index, params in enumerate(self._params):
            for param in map(local_of, params):
                if param.grad is not None:
                    found.setdefault((index, param.device), []).append(place)
                    place += 1
        return found

    def _add(
        self, optimizer: FusedAdam, index: int, device: torch.device, places: list[int]
    ) -> None:
        params = [self._reader.params[place] for place in places]
        states = [optimizer._state_of(self._parts_of[param]) for param in params]
        if not self._shared:
            self._add_alike(optimizer, (index, device), places, states, states)
            return
        # Upstream's one counter: the last parameter counts, once for each dtype, for all of it.
        for dtype in FLOATS:
            rows = zip(places, params, states, strict=True)
            alike = [(at, state) for at, param, state in rows if param.dtype == dtype]
            if alike:
                chosen, own = map(list, zip(*alike, strict=True))
                self._add_alike(optimizer, (index, device, dtype), chosen, own, states[-1:])

    def _add_alike(
        self,
        optimizer: FusedAdam,
        key: tuple[Any, ...],
        places: list[int],
        states: list[dict[str, Tensor]],
        counting: list[dict[str, Tensor]],
    ) -> None:
        params = [self._reader.params[place] for place in places]
        columns = [params, *([local_of(state[name]) for state in states] for name in MOMENTS)]
        whole = places == list(range(places[0], places[0] + len(places)))
        contiguous = all(self._reader.contiguous[place] for place in places)
        self.parts.append(
            _Part(
                index=key[0],
                device=key[1],
                places=slice(places[0], places[0] + len(places)) if whole else places,
                lists=optimizer._fixed[key].of(lambda: chain(*columns), lambda: columns),
                layout=Layout([gradient(param) for param in params]) if contiguous else None,
                steps=FixedTensors(state["step"] for state in counting),
            )
        )

    def read(self, optimizer: FusedAdam) -> Found | None:
        """Return the gradients of this step; None where the plan does not fit any more."""
        groups = optimizer.param_groups
        if len(groups) != len(self._params) or self._shared != optimizer.compat.shared_step_counter:
            return None
        if not all(map(same, (group["params"] for group in groups), self._params)):
            return None
        if self._dtensors:
            if any(local_of(param) not in self._parts_of for param in self._dtensors):
                return None
            self._lend_gradients()
        return self._reader.read() if self._state.holds(optimizer.state) else None

    def _lend_gradients(self) -> None:
        """Let parts of DTensors have their parts of the gradients."""
        check_gradient_shards(self._dtensors, "FusedAdam.step")
        for param in self._dtensors:
            local_of(param).grad = None if param.grad is None else local_of(param.grad)
