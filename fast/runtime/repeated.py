"""Launches of a step, made again as they were while nothing has changed that they were made from.

From one step to the next the same kernels run on the same memory, but for gradients. What puts
their arguments together is Python, and takes longer than all else that the host does. So launches
are noted as they are made (`fast.runtime.recorder`), and made again where all of this is as it was:
the caller's key, the lists, the memory of every argument, the kernels' sources, the driver, its
device and its stream. Anything else makes them anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from twinstep.fast.runtime.dispatch import surroundings
from twinstep.fast.runtime.lists import FixedTensors, Key, MovingTensors, address_at
from twinstep.fast.runtime.recorder import Noted, Recorder, Roles, recording
from twinstep.fast.runtime.tables import reachable
from twinstep.fast.runtime.uploads import is_capturing, on_device
from twinstep.fast.runtime.watch import addresses_of, same

Result = TypeVar("Result")


class Repeated:
    """Launches of one optimizer's step; the one before is kept."""

    def __init__(self) -> None:
        self._kept: _Recording | None = None

    def forget(self) -> None:
        """Make the launches of the next step anew."""
        self._kept = None

    def __call__(
        self,
        key: Sequence[object],
        roles: Roles,
        device: torch.device | None,
        make: Callable[[], Result],
    ) -> Result:
        """Make the launches of a step.

        Args:
            key: objects that decide what is launched, with the gradients' lists; compared by
                identity and kept alive.
            roles: lists of gradients that `make` reads: new ones, of the same layouts, at each
                step.
            device: of everything; None where there are several.
            make: makes the launches.

        Returns:
            What `make` returned when it was called last.
        """
        # Whatever fails, or happens in another way, is not repeated.
        kept, self._kept = self._kept, None
        # A graph that is being captured takes tables away.
        if device is None or is_capturing(device) or not all(map(_is_known, roles)):
            return make()
        with on_device(device):
            around = surroundings(device)
            if around is None:
                return make()
            # A tuple: what is compared here is no reason to compile the reader of long lists.
            key = (*key, *map(_identity, roles))
            if kept is not None and kept.fits(key, around, roles):
                kept.launch(roles)
                self._kept = kept
                return cast(Result, kept.result)
            recorder = Recorder(roles)
            with recording(recorder):
                result = make()
        if recorder.complete:
            self._kept = _Recording(recorder, key, around, roles, result)
        return result


class _Recording:
    """Launches that were noted, and what they were made from."""

    def __init__(
        self, noted: Recorder, key: Key, around: Key, roles: Roles, result: object
    ) -> None:
        self._key, self._around, self.result = key, around, result
        self._launches, self._tables, self._zeros = noted.launches, noted.tables, noted.zeros
        self._kernels, self._slots = noted.kernels, noted.slots
        self._tensors = list({id(tensor): tensor for tensor in noted.tensors}.values())
        self._places = addresses_of(self._tensors)
        self._aligned = self._alignments(roles)

    def _alignments(self, roles: Roles) -> list[bool]:
        """Of lists of one tensor, whether a kernel may take that as it is."""
        return [address_at(roles[number], slot) % 16 == 0 for number, slot in self._slots.items()]

    def fits(self, key: Key, around: Key, roles: Roles) -> bool:
        """Return True if everything is as it was."""
        return (
            around == self._around
            and same(key, self._key)
            and addresses_of(self._tensors) == self._places
            and all(kernel.unchanged() for kernel in self._kernels)
            and self._alignments(roles) == self._aligned
        )

    def launch(self, roles: Roles) -> None:
        """Make the launches again."""
        for table, number in self._tables:
            table.move(cast(MovingTensors, roles[number]))
        for memory in self._zeros:
            memory.zero_()
        for each in self._launches:
            words = self._words(each, roles) if each.alone else each.words
            if each.reaches:
                with reachable([roles[r] if isinstance(r, int) else r for r in each.reaches]):
                    each.call(*words)
            else:
                each.call(*words)

    def _words(self, launch: Noted, roles: Roles) -> list[object]:
        """Arguments of a launch that takes a gradient itself."""
        words = list(launch.words)
        for place, number in launch.alone:
            role, slot = roles[number], self._slots[number]
            words[place] = address_at(role, slot) if launch.by_address else role[slot]
        return words


def _is_known(role: Sequence[Tensor]) -> bool:
    return isinstance(role, MovingTensors | FixedTensors)


def _identity(role: Sequence[Tensor]) -> object:
    """What is the same object while a list stays where it is, or moves in the same layout."""
    return role.layout if isinstance(role, MovingTensors) else role
