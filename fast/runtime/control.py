"""The control block: every scalar of an optimizer step in one small tensor on the device.

    slot  name                 dtype     written by
    0     lr                   float64   the host, when it changes
    1     beta1                float64   the host
    2     beta2                float64   the host
    3     eps                  float64   the host
    4     weight_decay         float64   the host
    5     max_coeff            float64   the host
    6     min_coeff            float64   the host
    7     max_norm             float64   the host
    8     scale_factor         float64   the host
    9     scale_window         int64     the host
    10    min_scale            float64   the host
    11    delayed_shift        int64     the host
    12    backoff_factor       float64   the host
    13    external_scale       float64   the host
    14    scale                float64   the step
    15    cur_iter             int64     the step
    16    last_overflow_iter   int64     the step
    17    cur_hysteresis       int64     the step
    18    growth_tracker       int64     the step
    19    exhausted            int64     the step
    20    norm                 float32   the step (first half of the slot)
    21    found_inf            float32   the step (first half of the slot)
    22    factor               float32   the step (first half of the slot)

The block is one int64 tensor; a control is a 0-dim view of its slot. What the host writes is the
beginning of the block, so that one asynchronous copy carries it.
"""

import struct
from collections.abc import Iterable, Mapping
from operator import is_
from typing import cast

import torch
from torch import Tensor

from twinstep.contract.hyper import Number, require_number
from twinstep.contract.wrapper import ParamGroup
from twinstep.fast.runtime.uploads import StagingRing

HOST = {
    "lr": torch.float64,
    "beta1": torch.float64,
    "beta2": torch.float64,
    "eps": torch.float64,
    "weight_decay": torch.float64,
    "max_coeff": torch.float64,
    "min_coeff": torch.float64,
    "max_norm": torch.float64,
    "scale_factor": torch.float64,
    "scale_window": torch.int64,
    "min_scale": torch.float64,
    "delayed_shift": torch.int64,
    "backoff_factor": torch.float64,
    "external_scale": torch.float64,
}
DEVICE = {
    "scale": torch.float64,
    "cur_iter": torch.int64,
    "last_overflow_iter": torch.int64,
    "cur_hysteresis": torch.int64,
    "growth_tracker": torch.int64,
    "exhausted": torch.int64,
    "norm": torch.float32,
    "found_inf": torch.float32,
    "factor": torch.float32,
}
# What belongs to a parameter group; the rest belongs to a whole step.
HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "max_coeff", "min_coeff")
SLOTS = {name: slot for slot, name in enumerate((*HOST, *DEVICE))}
FORMATS = {torch.float64: "<d", torch.int64: "<q", torch.float32: "<f4x"}


def word_of(name: str, value: float) -> int:
    """Return the 64 bits of a control's slot as an int64.

    >>> word_of("scale_window", 1000)
    1000
    """
    dtype = (HOST | DEVICE)[name]
    whole = int(value) if dtype is torch.int64 else value
    (word,) = struct.unpack("<q", struct.pack(FORMATS[dtype], whole))
    return int(word)


class ControlBlock:
    """Controls by name, as 0-dim tensors on the device.

    Args:
        device: where steps run.
        values: first values by name; slots that are not named hold 0.
    """

    def __init__(self, device: torch.device, values: Mapping[str, float]) -> None:
        words = [0] * len(SLOTS)
        for name, value in values.items():
            words[SLOTS[name]] = word_of(name, value)
        self._words = words
        self.block = torch.tensor(words).to(device)
        self._ring = StagingRing(len(HOST))
        self._changed = False
        self._given: dict[str, float] = {}  # numbers as they were set last
        self._foreign: dict[str, Tensor] = {}  # tensors used instead of a slot
        self._ordered: dict[tuple[str, ...], list[Tensor]] = {}  # of `several`
        self._held: dict[str, Tensor] = {}  # converted ones, at addresses that do not change
        kinds = {dtype: self.block.view(dtype) for dtype in FORMATS}
        self._views = {
            name: kinds[dtype][SLOTS[name] * (2 if dtype is torch.float32 else 1)]
            for name, dtype in (HOST | DEVICE).items()
        }

    def __getitem__(self, name: str) -> Tensor:
        """Return a control: a view of its slot, or the tensor that was set in its place."""
        return self._foreign.get(name, self._views[name])

    def several(self, names: tuple[str, ...]) -> list[Tensor]:
        """Controls in the order of their names; nothing may be written into the list."""
        found = self._ordered.get(names)
        if found is None:
            found = self._ordered[names] = [self[name] for name in names]
        return found

    def set(self, name: str, value: Number) -> None:
        """Give a control of the host a new value; `sync_hyperparameters` sends it.

        A tensor of the slot's dtype on the device is used where it lies, without a copy; another
        one there is converted, now. A tensor on the CPU beside a GPU is a number.
        """
        if value is self._given.get(name):
            return
        if self._foreign.pop(name, None) is not None or isinstance(value, Tensor):
            self._ordered.clear()
        self._given.pop(name, None)
        require_number(name, value, "ControlBlock.set")
        if isinstance(value, Tensor) and (value.device.type, self.block.device.type) == (
            "cpu",
            "cuda",
        ):
            value = value.item()  # known here, and sent like any number: nothing waits
        if not isinstance(value, Tensor):
            word = word_of(name, value)
            self._changed = self._changed or word != self._words[SLOTS[name]]
            self._words[SLOTS[name]] = word
            self._given[name] = value
            return
        view = self._views[name]
        if value.dtype == view.dtype and value.device == view.device:
            self._foreign[name] = value.detach().reshape(())
            return
        held = self._held.setdefault(name, torch.empty_like(view))
        held.copy_(value.detach().reshape(()), non_blocking=True)
        self._foreign[name] = held

    def sync_hyperparameters(self) -> None:
        """Send what `set` has changed, in one asynchronous copy; nothing if nothing changed.

        A captured graph reads the block, so a change reaches it from outside: call this before
        replaying the graph.

        Raises:
            RuntimeError: something changed while a CUDA graph is being captured.
        """
        if not self._changed:
            return
        self._send(self._words[: len(HOST)], self.block[: len(HOST)])
        self._changed = False

    def _send(self, words: list[int], target: Tensor) -> None:
        if target.device.type != "cuda":
            target.copy_(torch.tensor(words))
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "hyper-parameters changed while a CUDA graph is being captured, but should be "
                "sent before: call sync_hyperparameters() first [ControlBlock]"
            )
        with torch.cuda.device(target.device):
            self._ring.send(words, target)


class GroupBlock(ControlBlock):
    """The hyper-parameters of one parameter group on one device, sent when they change.

    Args:
        device: where steps run.
        lamb: the group has bounds of the trust ratio.
    """

    def __init__(self, device: torch.device, *, lamb: bool) -> None:
        super().__init__(device, {"factor": 1.0})
        self.lamb = lamb
        bounds = ("max_coeff", "min_coeff", "max_grad_norm") if lamb else ()
        self._names = ("lr", "eps", "weight_decay", *bounds)
        self._hyper = HYPER if lamb else HYPER[:5]
        self._last: list[object] | None = None  # numbers that were sent

    def set_group(self, group: ParamGroup) -> None:
        """Take over a group's hyper-parameters, in at most one asynchronous copy."""
        values = [*cast("Iterable[Number]", group["betas"]), *map(group.__getitem__, self._names)]
        if self._last is not None and all(map(is_, values, self._last)):
            return
        self._last = None
        names = ("beta1", "beta2", *self._names)
        for name, value in zip(names, values, strict=True):
            self.set("max_norm" if name == "max_grad_norm" else name, cast(Number, value))
        self.sync_hyperparameters()
        # What a tensor holds may change.
        if not any(isinstance(value, Tensor) for value in values):
            self._last = values

    def hyper(self) -> list[Tensor]:
        """The group's controls, in the order of HYPER."""
        return self.several(self._hyper)
