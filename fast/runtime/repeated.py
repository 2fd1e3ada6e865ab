"""Launches of a step, made again as they were while nothing has changed that they were made from.

From one step to the next the same kernels run on the same memory, but for gradients. What puts
their arguments together is Python, and takes longer than all else that the host does. So launches
are noted as they are made (`fast.runtime.recorder`), and made again where all of this is as it was:
the caller's key, the lists, the memory of every argument, the kernels' sources, the driver, its
device and its stream. Anything else makes them anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from twinstep.fast.runtime.compiled import Sources
from twinstep.fast.runtime.dispatch import surroundings
from twinstep.fast.runtime.lists import FixedTensors, Key, MovingTensors
from twinstep.fast.runtime.recorder import Recorder, TensorLists, recording
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
        lists: TensorLists,
        device: torch.device | None,
        make: Callable[[], Result],
    ) -> Result:
        """Make the launches of a step.

        Args:
            key: objects that decide what is launched; compared by identity and kept alive, as the
                lists are.
            lists: of gradients, that `make` reads.
            device: of everything; None where there are several.
            make: makes the launches.

        Returns:
            What `make` returned when it was called last.
        """
        # Whatever fails, or happens in another way, is not repeated.
        kept, self._kept = self._kept, None
        # A graph that is being captured takes tables away.
        if device is None or is_capturing(device):
            return make()
        with on_device(device):
            around = surroundings(device)
            if around is None:
                return make()
            # A tuple: what is compared here is no reason to compile the reader of long lists.
            key = (*key, *lists)
            if kept is not None and kept.fits(key, around):
                kept.launch()
                self._kept = kept
                result: Result = kept.result
                return result
            if not all(isinstance(each, MovingTensors | FixedTensors) for each in lists):
                return make()
            recorder = Recorder(lists)
            with recording(recorder):
                result = make()
        if recorder.complete:
            self._kept = _Recording(recorder, key, around, result)
        return result


class _Recording:
    """Launches that were noted, and what they were made from."""

    def __init__(self, noted: Recorder, key: Key, around: Key, result: Any) -> None:
        self._key, self._around, self.result = key, around, result
        self._tables, self._zeros = noted.tables, noted.zeros
        self._launches = [
            (each.call, each.words, each.alone, reachable(each.reaches) if each.reaches else None)
            for each in noted.launches
        ]
        self._sources = Sources(noted.kernels)
        # Whether a kernel may take the only tensor of a list as it is.
        self._aligned = [(each, at, each.addresses[at] % 16 == 0) for each, at in noted.alone]
        # Controls are views of one memory: it lies elsewhere for all of them, or for none.
        memories = {tensor.untyped_storage().data_ptr(): tensor for tensor in noted.tensors}
        self._tensors = list(memories.values())
        self._places = addresses_of(self._tensors)

    def fits(self, key: Key, around: Key) -> bool:
        """Return True if everything is as it was."""
        for role, slot, aligned in self._aligned:
            if (role.addresses[slot] % 16 == 0) is not aligned:
                return False
        return (
            around == self._around
            and same(key, self._key)
            and addresses_of(self._tensors) == self._places
            and self._sources.unchanged()
        )

    def launch(self) -> None:
        """Make the launches again."""
        for table, role in self._tables:
            table.move(role)
        for memory in self._zeros:
            memory.zero_()
        for call, words, alone, within in self._launches:
            for place, role, slot, by_address in alone:
                words[place] = role.addresses[slot] if by_address else role[slot]
            if within is None:
                call(*words)
            else:
                with within:
                    call(*words)
            for place, _, _, _ in alone:
                words[place] = None
