"""Launches on names, and the names of tensors.

with naming() as session:
    name_tensor(session, p, "p")
    kernel[grid](p, n)
    names_of(session, p)        # numbers of expressions in session.table
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from torch import Tensor

from twinstep.replay.dtypes import Array
from twinstep.replay.launch.options import TRANSLATION
from twinstep.replay.machine.program import Program
from twinstep.replay.names.emit import NamingEmitter
from twinstep.replay.names.rules import RULES
from twinstep.replay.names.session import SESSION, Session
from twinstep.replay.names.sums import Places, nowhere
from twinstep.replay.names.values import value, wrapped
from twinstep.replay.translate.program import emitted
from twinstep.replay.translate.registers import RegisterTypes


@cache
def named_program(program: Program, sums: Places = nowhere) -> Program:
    """The named translation of a program, made once; `sums` says where the code of sums is."""
    kernel, layout = program.kernel, program.layout
    emitter = NamingEmitter(kernel, RegisterTypes(kernel), layout, RULES, sums)
    return emitted(kernel, layout, emitter)


def translation_for(session: Session) -> Callable[[Program], Program]:
    """Translates a program for a session."""
    return lambda program: named_program(program, session.sums.places)


@contextmanager
def naming(session: Session | None = None) -> Iterator[Session]:
    """Run every launch on replay inside the context on names."""
    own = session or Session()
    before, translation = SESSION.set(own), TRANSLATION.set(translation_for(own))
    try:
        yield own
    finally:
        SESSION.reset(before)
        TRANSLATION.reset(translation)


def places_of(tensor: Tensor) -> Array:
    """The granules of a tensor's elements, along a last axis; 8-bit elements share one."""
    size = tensor.element_size()
    count = torch.arange(tensor.numel()).reshape(tensor.shape)
    if not tensor.is_contiguous():
        index = torch.zeros(tensor.shape, dtype=torch.int64)
        for dim, (length, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            shape = [1] * tensor.dim()
            shape[dim] = length
            index += (torch.arange(length) * step).reshape(shape)
        count = index
    start = (tensor.data_ptr() + size * count.numpy()) // 2
    return np.asarray(start[..., None] + np.arange(max(size // 2, 1)))


def granules_of(tensor: Tensor) -> Array:
    """The bits of a tensor's elements as granules, along a last axis."""
    flat = tensor.detach().contiguous().reshape(-1)
    size = tensor.element_size()
    if size == 1:
        return flat.view(torch.uint8).numpy().astype(np.uint16).reshape(*tensor.shape, 1)
    bits = flat.view(torch.int16).numpy().view(np.uint16)
    return bits.reshape(*tensor.shape, size // 2)


def name_tensor(session: Session, tensor: Tensor, name: str) -> Array:
    """Make a leaf of every element; the numbers of the leaves, in the tensor's shape."""
    g = tensor.element_size() // 2
    count = tensor.numel()
    words = [name if tensor.dim() == 0 else f"{name}[{i}]" for i in range(count)]
    numbers = np.array([session.table.leaf(word, g) for word in words], np.int64)
    numbers = numbers.reshape(tensor.shape)
    set_names(session, tensor, numbers)
    return numbers


def set_names(session: Session, tensor: Tensor, numbers: Array | None) -> None:
    """Put names beside a tensor's elements; none, or -1, where they derive from no leaf."""
    if not tensor.numel() or tensor.element_size() == 1:
        return
    places, bits = places_of(tensor), granules_of(tensor)
    codes = np.full(places.shape, -1, np.int64)
    if numbers is not None:
        codes = session.table.codes(np.broadcast_to(numbers, tensor.shape), places.shape[-1])
    session.memory.store(places.reshape(-1), codes.reshape(-1), bits.reshape(-1))


def names_of(session: Session, tensor: Tensor, site: str = "") -> Array:
    """The numbers of a tensor's elements; -1 where one derives from no leaf."""
    if not tensor.numel() or tensor.element_size() == 1:
        return np.full(tensor.shape, -1, np.int64)
    places, bits = places_of(tensor), granules_of(tensor)
    g = places.shape[-1]
    codes = session.memory.load(places.reshape(-1), bits.reshape(-1), site).reshape(places.shape)
    whole = np.ascontiguousarray(bits).view(f"u{2 * g}")[..., 0]
    flat = value(whole.reshape(1, -1), wrapped(codes.reshape(1, -1, g)), f"b{16 * g}")
    return np.asarray(flat.reshape(tensor.shape))
