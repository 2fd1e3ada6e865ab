"""Records, enums and exceptions that both sides define under one name are equal."""

from __future__ import annotations

import dataclasses
import enum
import importlib
from pathlib import Path

import pytest

from tools.source import python_files


def shape(kind: type) -> object:
    """Equal parts: fields with type and default, members with value, or base classes."""
    if dataclasses.is_dataclass(kind):
        fields = [(item.name, str(item.type), _default(item)) for item in dataclasses.fields(kind)]
        parameters = getattr(kind, "__dataclass_params__", None)
        return fields, getattr(parameters, "frozen", None)
    if issubclass(kind, enum.Enum):
        return [(member.name, member.value) for member in kind]
    return [base.__name__ for base in kind.__bases__]


def is_record(kind: object) -> bool:
    """True if a class is data: a dataclass, an enum or an exception."""
    data = (enum.Enum, Exception)
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, data))


def records(side: str) -> dict[str, type]:
    """Public records that one side defines, by name."""
    found: dict[str, type] = {}
    for path in python_files(side):
        module = importlib.import_module(_module_name(path))
        for name, kind in vars(module).items():
            if is_record(kind) and kind.__module__ == module.__name__ and name[0] != "_":
                found[name] = kind
    return found


def differences(one: dict[str, type], other: dict[str, type]) -> list[str]:
    """Records of the same name that are not equal, one sentence for each."""
    return [
        f"{name} differs: {shape(one[name])} in {one[name].__module__}, "
        f"{shape(other[name])} in {other[name].__module__}"
        for name in sorted(one.keys() & other.keys())
        if shape(one[name]) != shape(other[name])
    ]


def test_records_of_the_same_name_are_equal_on_both_sides() -> None:
    one, other = records("reference"), records("fast")
    assert one, "the reference defines no record at all, so nothing was compared"
    assert differences(one, other) == []


def record(*, frozen: bool = True, **defaults: int) -> type:
    """A record with these fields."""
    fields = [(name, "int", dataclasses.field(default=at)) for name, at in defaults.items()]
    return dataclasses.make_dataclass("Compat", fields, frozen=frozen, kw_only=True)


@pytest.mark.parametrize(
    "changed",
    [
        record(scale_window=1000, hysteresis=1),
        record(scale_window=1000, delay=2),
        record(scale_window=1000, hysteresis=2, frozen=False),
    ],
    ids=["default", "field", "not frozen"],
)
def test_a_changed_record_is_found(changed: type) -> None:
    original = record(scale_window=1000, hysteresis=2)
    assert differences({"Compat": original}, {"Compat": changed})
    assert differences({"Compat": original}, {"Compat": original}) == []


def test_a_changed_enum_or_exception_is_found() -> None:
    class Rule(enum.Enum):
        A = 1

    class Other(enum.Enum):
        A = 2

    assert differences({"Rule": Rule}, {"Rule": Other})
    as_value, as_runtime = type("E", (ValueError,), {}), type("E", (RuntimeError,), {})
    assert differences({"E": as_value}, {"E": as_runtime})


def _default(item: dataclasses.Field[object]) -> str:
    if item.default_factory is not dataclasses.MISSING:
        return repr(item.default_factory())
    return repr(item.default)


def _module_name(path: Path) -> str:
    return ".".join(("twinstep", *path.with_suffix("").parts)).removesuffix(".__init__")
