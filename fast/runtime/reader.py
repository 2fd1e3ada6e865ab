"""Long lists of tensors read by C++ in one call, past Python's calls into torch.

The library (`reader.cpp`) is compiled at first use (`fast.runtime.building`), with the headers that
torch's wheel brings and those of Python, and kept for this version of both. Where there is no
compiler or no header, or where it does not read a few tensors as Python does, Python reads all
lists, with the same results. It never says more than Python would: what is not as it was when
Python looked at it last is a no, and Python looks again.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn import Parameter

from twinstep.fast.runtime import building

LONG = 32  # tensors of a list that is worth a call
MAIN = "reader.cpp"
PLAIN = {Tensor, Parameter}  # others may answer for themselves
NOTHING = 0  # a pointer
_OBJECT, _POINTER, _ANSWER = ctypes.py_object, ctypes.c_void_p, ctypes.c_int
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "same_objects": (_OBJECT, _OBJECT),
    "where_they_were": (_OBJECT, _POINTER),
    "read_gradients": (_OBJECT, _POINTER, _POINTER, _POINTER, _POINTER),
    "without_gradients": (_OBJECT,),
    "same_items": (_OBJECT, _OBJECT, _OBJECT),
    "same_entries": (_OBJECT, _OBJECT, _OBJECT),
}
_WITHOUT_ANSWER: dict[str, tuple[type, ...]] = {
    "set_place": (ctypes.c_ssize_t,),
    "drop_gradients": (_OBJECT,),
    "still_noted": (_OBJECT, _OBJECT, _POINTER),
}


class Reader:
    """The library's functions.

    Lists hold tensors of a class in PLAIN alone; arrays are of int64, as long as the list.

    Args:
        path: of the library.

    Raises:
        OSError: it cannot be loaded.
        RuntimeError: it does not read tensors as Python does.
    """

    def __init__(self, path: Path) -> None:
        functions = ctypes.PyDLL(str(path))
        for name, types in (_SIGNATURES | _WITHOUT_ANSWER).items():
            function = getattr(functions, name)
            function.argtypes = types
            function.restype = _ANSWER if name in _SIGNATURES else None
        functions.note_gradients.argtypes = (_OBJECT,)
        functions.note_gradients.restype = _OBJECT
        functions.set_place(_place_of_tensor())
        self._functions = functions
        self._require_same_answers()

    def same_objects(self, found: object, before: object) -> bool:
        """Return True if two lists hold the same objects."""
        return bool(self._functions.same_objects(found, before))

    def where_they_were(self, tensors: list[Tensor], places: array[int]) -> bool:
        """Return True if tensors lie at these addresses."""
        return bool(self._functions.where_they_were(tensors, _start_of(places)))

    def kinds_of_gradients(
        self, params: list[Tensor], places: array[int], addresses: array[int]
    ) -> array[int] | None:
        """Kinds of the gradients of now, for `gradients`; None where it cannot read them.

        Args:
            params: that have gradients.
            places: where they lie.
            addresses: of the gradients, as Python reads them.
        """
        found, kinds = words(len(params)), words(2 * len(params))
        given = (params, _start_of(places), NOTHING, _start_of(found), _start_of(kinds))
        return kinds if self._functions.read_gradients(*given) and found == addresses else None

    def gradients(
        self, params: list[Tensor], places: array[int], kinds: array[int]
    ) -> array[int] | None:
        """Addresses of gradients; None where not all are there and of the kinds that they were.

        Args:
            params: that have gradients.
            places: where they should lie.
            kinds: of the gradients, from `kinds_of_gradients`.
        """
        found = words(len(params))
        given = (params, _start_of(places), _start_of(kinds), _start_of(found), NOTHING)
        return found if self._functions.read_gradients(*given) else None

    def without_gradients(self, params: list[Tensor]) -> bool:
        """Return True if none of the parameters has a gradient."""
        return bool(self._functions.without_gradients(params))

    def same_items(self, found: object, keys: list[object], values: list[object]) -> bool:
        """Return True if a dict has these keys and values, as objects, in this order."""
        return bool(self._functions.same_items(found, keys, values))

    def same_entries(
        self, dicts: Sequence[object], names: Sequence[str], tensors: list[Tensor]
    ) -> bool:
        """Return True if dicts hold these tensors.

        Args:
            dicts: a list of them.
            names: a tuple of keys.
            tensors: those of the first dict in the order of the names, and so on.
        """
        return bool(self._functions.same_entries(dicts, names, tensors))

    def drop(self, params: list[Tensor]) -> None:
        """Drop the gradients of parameters."""
        self._functions.drop_gradients(params)

    def note(self, params: list[Tensor]) -> object:
        """Note the gradients of parameters, as objects; they are not kept alive."""
        return self._functions.note_gradients(params)

    def still_noted(self, notes: object, params: list[Tensor]) -> list[Tensor]:
        """Parameters that still have the gradient that was noted."""
        still = bytearray(len(params))
        flags = (ctypes.c_char * len(still)).from_buffer(still)
        self._functions.still_noted(notes, params, ctypes.addressof(flags))
        return [param for param, kept in zip(params, still, strict=True) if kept]

    def _require_same_answers(self) -> None:
        """Read tensors of several kinds as a trial."""
        room = torch.zeros(24)
        views = (room[:6].view(2, 3), room[9:15].view(3, 2).t(), room[24:], room[7])
        params: list[Tensor] = [Parameter(view) for view in views]
        for param in params:
            param.grad = torch.ones_like(param)
        places = array("q", map(Tensor.data_ptr, params))
        addresses = array("q", (cast(Tensor, param.grad).data_ptr() for param in params))
        kinds = self.kinds_of_gradients(params, places, addresses)
        if kinds is None or self.gradients(params, places, kinds) != addresses:
            raise RuntimeError("tensors are read otherwise than by Python [fast.runtime.reader]")


def words(count: int) -> array[int]:
    """Zeros."""
    return array("q", bytes(8 * count))


def _start_of(found: array[int]) -> int:
    return found.buffer_info()[0]


def _place_of_tensor() -> int:
    """Offset of the pointer to C++ in a tensor's Python object, in bytes.

    Raises:
        RuntimeError: nowhere that is known.
    """
    sample, first = Parameter(torch.zeros(1)), object.__basicsize__
    for place in (first, first + 8):
        word = ctypes.c_void_p.from_address(id(sample) + place)
        if place + 8 <= Tensor.__basicsize__ and word.value == sample._cdata:
            return place
    raise RuntimeError("tensors are laid out in an unknown way [fast.runtime.reader]")


@cache
def library() -> Reader | None:
    """The library for this machine, built if it has not been; None where Python has to do."""
    try:
        return Reader(_built())
    except (RuntimeError, OSError, AttributeError):
        return None


def _built() -> Path:
    """Compile the library, unless the cache has it.

    Raises:
        RuntimeError: there is no compiler, or it fails, or nothing can be written.
    """
    folder = Path(torch.__file__).resolve().parent
    flags = [
        *("-std=c++20", "-O2", "-shared", "-fPIC", "-DNDEBUG"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *("-I", str(folder / "include"), "-I", sysconfig.get_paths()["include"]),
        # What this process has loaded under the same names.
        *("-Wl,--no-as-needed", "-L", str(folder / "lib"), "-ltorch_cpu", "-lc10"),
    ]
    text = (resources.files("twinstep.fast.runtime") / MAIN).read_text()
    source = building.Source(
        name="reader",
        what="readers of tensors",
        where="fast.runtime.reader",
        main=MAIN,
        files={MAIN: text},
    )
    return building.built(
        source, flags, (torch.__version__, str(torch.version.git_version), sys.version)
    )


def reader_of(*lists: Sequence[object]) -> Reader | None:
    """The library where these lists are long together, and hold plain tensors; or None."""
    if sum(map(len, lists)) < LONG or not all(map(is_plain, lists)):
        return None
    return library()


def is_plain(tensors: Iterable[object]) -> bool:
    """Return True if all tensors are of a class that does not answer for itself."""
    return set(map(type, tensors)) <= PLAIN
