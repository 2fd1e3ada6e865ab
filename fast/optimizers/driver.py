"""One step from gradients to weights: reduce, finalise, update; nothing waits.

    found_inf = any gradient is not finite
    norm      = of the scaled gradients / the scale they were made with
    factor    = 1 / (scale c) where the norm is too long, else 1 / scale
    p, m, v   = Adam, AdamW or LAMB with that factor, and model weights = p rounded once
    scale     = its rule, after everything that used it

Gradients without a scale are clipped by min(1, max_norm / norm), and a norm that is
not finite skips the step.

Three launches for one group and dtype with Adam, five with LAMB. Each further group takes one more
to form its coefficients, and an update of its own; so does a first group of more than SERIAL
counters, which one program would advance one after the other. 16-bit accumulators that are clipped
take one more: clipping rounds to their dtype, as storing the clipped gradient would.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from twinstep.fast.kernels import finalise as finalise_kernel
from twinstep.fast.kernels import finalise_unscaled
from twinstep.fast.kernels._arith import INV_SCALE, LANES
from twinstep.fast.kernels._limbs import REFUSED, TOLD
from twinstep.fast.kernels.adam import prepare_adam, update_adam
from twinstep.fast.kernels.clip import clip_coefficient_
from twinstep.fast.kernels.finalise import Finish
from twinstep.fast.kernels.lamb import prepare_lamb, update_lamb
from twinstep.fast.kernels.mixed_step import new_coefficients
from twinstep.fast.kernels.reduce import new_limbs
from twinstep.fast.kernels.unscale import unscale_gradients
from twinstep.fast.optimizers.fused_adam import FusedAdam
from twinstep.fast.optimizers.fused_lamb import FusedLamb
from twinstep.fast.optimizers.group_tensors import GroupTensors
from twinstep.fast.optimizers.norms import GIVEN, kind_of_norm, norm_on_host
from twinstep.fast.optimizers.parallelism import Gradients, Parallelism
from twinstep.fast.optimizers.reduction import reduce_over_ranks
from twinstep.fast.optimizers.scalers import LossScale
from twinstep.fast.runtime.control import SLOTS, ControlBlock, GroupBlock
from twinstep.fast.runtime.repeated import Repeated
from twinstep.fast.runtime.tables import TableCache

SERIAL = 4 * LANES.value  # counters
KERNELS = (FusedAdam, FusedLamb)  # whose update is a kernel here
OWN = finalise_unscaled.CONTROLS[5:]  # that belong to no group
SCALED = (*finalise_kernel.CONTROLS, "external_scale")


class StepDriver:
    """Steps of one optimizer around another one.

    Args:
        device: of everything.
        scaler: whose control block holds the scale; None without one.
        finish: the rule of the loss scale and what the control block is left with; None for
            gradients without a scale.
        norm_type: of the norm that clips.

    Attributes:
        kind: of that norm; with GIVEN the host forms it.
    """

    # Whether a step of one rank does nothing but launches.
    _repeats = True

    def __init__(
        self,
        device: torch.device,
        scaler: LossScale | None,
        finish: Finish | None,
        norm_type: float,
    ) -> None:
        self.device = device
        self.cache = TableCache(limit=64)
        self._scaler, self._finish, self._norm_type = scaler, finish, norm_type
        self._finishes: dict[tuple[bool, bool, bool], Finish] = {}
        self._own = ControlBlock(device, {})
        self.kind = kind_of_norm(norm_type, "StepDriver")
        self._limbs = new_limbs(device)
        self._hyper: list[GroupBlock] = []
        self._coefficients: dict[int, Tensor] = {}
        self._ratios: dict[int, Tensor] = {}
        self._found_apart = torch.zeros((), dtype=torch.float32, device=device)
        self._no_group: tuple[GroupBlock, GroupTensors] | None = None
        self._repeated = Repeated()

    @property
    def control(self) -> ControlBlock:
        """The control block: scale, norm and found_inf of the last step."""
        return self._own if self._scaler is None else self._scaler.on(self.device)

    def sync_hyperparameters(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        external_scale: float | None = None,
    ) -> None:
        """Send what has changed; before replaying a captured graph, call this.

        Args:
            optimizer: whose groups' hyper-parameters the update reads, if that is a kernel here.
            max_norm: largest norm of the gradients; 0 or less for any.
            external_scale: what the gradients were made with, where it is not the scaler's.
        """
        if isinstance(optimizer, KERNELS):
            for index, group in enumerate(optimizer.param_groups):
                if index == len(self._hyper):
                    lamb = isinstance(optimizer, FusedLamb)
                    self._hyper.append(GroupBlock(self.device, lamb=lamb))
                self._hyper[index].set_group(group)
        control = self.control
        control.set("max_norm", max_norm)
        if external_scale is not None:
            control.set("external_scale", external_scale)
        control.sync_hyperparameters()

    def forget(self) -> None:
        """Hold no tensors of the last step any more."""
        self._repeated.forget()

    def refuse(self, parallelism: Parallelism, reason: Exception) -> NoReturn:
        """Tell the ranks that wait for the first message of a step that there is none.

        Raises:
            Exception: the reason.
        """
        none = parallelism.gradients({})
        if none.over_ranks:
            self._reduce(none, refusal=reason)
        raise reason

    def _reduce(
        self, gradients: Gradients, *, external: bool = False, refusal: Exception | None = None
    ) -> None:
        """Enter all gradients of all ranks into the limbs, and the norm if the host forms it.

        Raises:
            Exception: this rank refuses, or its gradients cannot be entered; other ranks know.
        """
        scale = None
        if self._scaler is not None and gradients.over_ranks:
            scale = self.control.block[SLOTS["external_scale" if external else "scale"]]
        refusal = reduce_over_ranks(
            gradients, self._limbs, self.kind, self.cache, scale=scale, refusal=refusal
        )
        if self.kind == GIVEN:
            norm = norm_on_host(gradients, self._norm_type, self._limbs, counts=refusal is None)
            if refusal is None:
                # As a tensor, since no number past the end of fp32 can be filled in as infinity.
                self.control["norm"].copy_(norm)
        if refusal is not None:
            self._limbs.zero_()
            raise refusal

    def decide(
        self,
        gradients: Gradients,
        first: GroupTensors | None = None,
        *,
        external: bool = False,
        clips_apart: bool = False,
        leaves_scaled_norm: bool = False,
    ) -> Tensor:
        """Reduce and finalise: norm, found_inf, the new scale, and coefficients of one group.

        Args:
            gradients: all that there are, contiguous.
            first: the group whose coefficients are formed and whose counters advance, if any.
                A norm that the host forms goes without one where gradients have no scale.
            external: the gradients were made with the external scale.
            clips_apart: the update does not clip; the control `factor` does.
            leaves_scaled_norm: leave the norm of the scaled gradients in the control block.

        Returns:
            The coefficients; INV_SCALE is what gradients are multiplied by.
        """
        self.forget()
        try:
            return self._decide(gradients, first, external, clips_apart, leaves_scaled_norm)
        except BaseException:
            # What has been entered belongs to no step: a lost rank, or a kernel that failed.
            self._limbs.zero_()
            raise

    def _decide(
        self,
        gradients: Gradients,
        first: GroupTensors | None,
        external: bool,
        clips_apart: bool,
        leaves_scaled_norm: bool,
    ) -> Tensor:
        self._reduce(gradients, external=external)
        unscaled = self._finish is None
        coefficients = self._room_for(int(unscaled) if first is None else len(first.steps))
        if self._finish is None:
            if gradients.over_ranks:
                self.control["exhausted"].add_(self._limbs[TOLD.value], alpha=REFUSED.value)
            if self.kind == GIVEN:
                self._finalise_given()
            else:
                self._finalise_unscaled(first, coefficients, clips_apart)
        else:
            choices = (
                first is None or first.bias_correction,
                self._finish.reports_scaled_norm or leaves_scaled_norm,
                gradients.over_ranks,
            )
            finish = self._finishes.get(choices)
            if finish is None:
                bias_correction, scaled, over_ranks = choices
                finish = replace(
                    self._finish,
                    bias_correction=bias_correction,
                    reports_scaled_norm=scaled,
                    over_ranks=over_ranks,
                )
                self._finishes[choices] = finish
            self._finalise(first, coefficients, finish, external)
        return coefficients

    def _finalise(
        self, first: GroupTensors | None, coefficients: Tensor, finish: Finish, external: bool
    ) -> None:
        control = self.control
        controls = list(control.several(finalise_kernel.CONTROLS))
        bounds = None
        if first is not None:
            hyper = self._hyper[0].hyper()
            controls[:5] = hyper[:5]
            bounds = (hyper[5], hyper[6]) if self._hyper[0].lamb else None
        finalise_kernel.finalise(
            self._limbs,
            () if first is None else first.steps,
            coefficients,
            controls,
            finish,
            self.cache,
            external=control["external_scale"] if external else None,
            bounds=bounds,
        )

    def _finalise_given(self) -> None:
        control, norm = self.control, self.control["norm"]
        control["found_inf"].copy_(~norm.isfinite())
        clip_coefficient_(norm=norm, max_norm=control["max_norm"], factor=control["factor"])
        self._limbs.zero_()

    def _finalise_unscaled(
        self, first: GroupTensors | None, coefficients: Tensor, clips_apart: bool
    ) -> None:
        control = self.control
        own = control.several(OWN)
        if first is None:
            # The kernel advances a counter and forms coefficients in any case.
            if self._no_group is None:
                step = torch.zeros((), dtype=torch.int64, device=self.device)
                tensors = GroupTensors(lists=(), steps=[step], bias_correction=False)
                self._no_group = GroupBlock(self.device, lamb=False), tensors
            hyper, first = self._no_group
        else:
            hyper = self._hyper[0]
        finalise_unscaled.finalise_unscaled(
            self._limbs,
            first.steps[0],
            coefficients,
            [*hyper.hyper(), *own],
            kind=self.kind,
            bias_correction=first.bias_correction,
            ahead=clips_apart,
            last=True,
        )

    def run(
        self,
        gradients: Gradients,
        groups: Sequence[GroupTensors],
        optimizer: FusedAdam | FusedLamb,
        *,
        external: bool = False,
        clip_apart: Sequence[Tensor] = (),
        timed: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Take one step, or skip it, with an optimizer whose update is a kernel here.

        Args:
            gradients: as in `decide`.
            groups: the tensors of each group of the optimizer.
            optimizer: whose options are used and whose `step` is not called.
            external: as in `decide`.
            clip_apart: gradients that are clipped by a launch of their own, before the update.
            timed: is entered with the name of each phase, "compute_norm" and "basic_step".
        """

        def make() -> None:
            apart = len(groups[0].steps) > SERIAL
            with timed("compute_norm"):
                first = self.decide(
                    gradients,
                    None if apart else groups[0],
                    external=external,
                    clips_apart=len(clip_apart) > 0,
                )
            with timed("basic_step"):
                if clip_apart:
                    # Only the norm decides: gradients that do not count in it cannot skip a step.
                    self.clip(clip_apart)
                if apart:
                    first = self._prepared(0, groups[0], first)
                self._update(first, groups, optimizer)

        # A norm that the host forms is written to memory by it, not by a launch.
        launched = self._repeats and self.kind != GIVEN and gradients.one_sum
        if launched and not gradients.over_ranks and timed is nullcontext and not clip_apart:
            lists = [gradients.counted, *[group.lists[1] for group in groups]]
            key = self._key(groups, optimizer, external)
            try:
                self._repeated(key, lists, self.device, make)
            except BaseException:
                self._limbs.zero_()
                raise
        else:
            self.forget()
            make()
        if isinstance(optimizer, FusedLamb):
            optimizer.record_coeffs(list(self._ratios.values()))

    def _key(
        self, groups: Sequence[GroupTensors], optimizer: FusedAdam | FusedLamb, external: bool
    ) -> list[object]:
        """What decides about the launches of a step, but for gradients."""
        form = "eps_inside_sqrt" if isinstance(optimizer, FusedLamb) else "adam_w_mode"
        key: list[object] = [form, getattr(optimizer, form), external, *groups]
        key += self.control.several(OWN if self._finish is None else SCALED)
        for hyper in self._hyper:
            key += hyper.hyper()
        return key

    def clip(self, gradients: Sequence[Tensor]) -> None:
        """Multiply gradients by the factor that `decide` has left, in place."""
        unscale_gradients(gradients, self.control["factor"], self._found_apart, self.cache)

    def _update(
        self, first: Tensor, groups: Sequence[GroupTensors], optimizer: FusedAdam | FusedLamb
    ) -> None:
        """Write masters, moments and model weights; `first` are the first group's coefficients."""
        coefficients = [first]
        for index, group in enumerate(groups[1:], start=1):
            coefficients.append(self._prepared(index, group, first))
        for index, (group, block) in enumerate(zip(groups, coefficients, strict=True)):
            if isinstance(optimizer, FusedLamb):
                self._update_lamb(index, group, block, optimizer.eps_inside_sqrt)
            else:
                update_adam(
                    group.lists,
                    block,
                    decoupled=optimizer.adam_w_mode,
                    cache=self.cache,
                    shared=group.shared,
                )

    def _prepared(self, index: int, group: GroupTensors, first: Tensor) -> Tensor:
        """Coefficients of a further group, with what was decided for the first."""
        hyper = self._hyper[index]
        prepare = prepare_lamb if hyper.lamb else prepare_adam
        return prepare(
            group.steps,
            [*hyper.hyper(), first[INV_SCALE.value], self.control["found_inf"]],
            bias_correction=group.bias_correction,
            cache=self.cache,
        )

    def _update_lamb(
        self, index: int, group: GroupTensors, coefficients: Tensor, eps_inside_sqrt: bool
    ) -> None:
        ratios = self._ratios.get(index)
        if ratios is None:
            # Until a step is taken there are none: a skipped one leaves them unchanged.
            ratios = torch.full((len(group.steps),), torch.nan, device=self.device)
            self._ratios[index] = ratios
        update_lamb(
            group.lists[:4],
            group.lists[4],
            coefficients,
            eps_inside_sqrt=eps_inside_sqrt,
            cache=self.cache,
            ratios=ratios,
            shared=group.shared,
        )

    def _room_for(self, count: int) -> Tensor:
        kept = self._coefficients.get(count)
        if kept is None:
            kept = self._coefficients[count] = new_coefficients(self.device, count)
        return kept
