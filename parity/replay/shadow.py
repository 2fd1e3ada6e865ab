"""Opt-in checks of order and of unwritten memory, with a shadow for every byte."""

from __future__ import annotations

import numpy as np
import torch

from parity.replay.access import Chosen, Site
from parity.replay.dtypes import Array
from parity.replay.lanes import Batch, Lanes
from parity.replay.memory import Regions


class Memory:
    """Shadow of all global memory of one launch."""

    def __init__(
        self, regions: Regions, races: bool, uninitialised: tuple[torch.Tensor, ...]
    ) -> None:
        self.regions = regions
        self.races = races


class Shadow:
    """The checks of one batch."""

    def __init__(self, memory: Memory, batch: Batch) -> None:
        self.memory = memory
        self.epoch = np.zeros(len(batch.blocks), np.int64)

    def access(self, site: Site, lanes: Lanes, chosen: Chosen) -> None:
        """Check and note an access of global memory."""

    def shared(self, site: Site, lanes: Lanes, flat: Array, row: Array, offset: Array) -> None:
        """Check and note an access of shared memory."""

    def barrier(self, lanes: Lanes) -> None:
        """All threads of these blocks have met."""
