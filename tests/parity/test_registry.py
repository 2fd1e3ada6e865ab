"""The registry names what is missing or wrong, in one sentence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from twinstep.parity.operations.operation import Operation
from twinstep.parity.operations.table import HOUSE, operation_named, operations
from twinstep.parity.records.errors import UsageError
from twinstep.parity.registry.house_kernels import CPU, CUDA, FILES, register_house
from twinstep.parity.registry.kernels import (
    Kernel,
    kernels,
    register,
    register_operation,
    registrations,
)

KERNELS = Path(__file__).resolve().parents[2] / "fast" / "kernels"
OTHER = operation_named("accumulate", "test")


def mine(accumulators: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    """A kernel of `accumulate` that does nothing."""


@pytest.fixture
def house() -> Iterator[list[Kernel]]:
    with registrations():
        register_house()
        yield list(kernels())


def launchers() -> Iterator[tuple[str, Callable[..., object]]]:
    for file in sorted(KERNELS.rglob("[!_]*.py")):
        inside = ".".join(file.relative_to(KERNELS).with_suffix("").parts)
        module = import_module(f"twinstep.fast.kernels.{inside}")
        for name, value in vars(module).items():
            here = inspect.isfunction(value) and value.__module__ == module.__name__
            if here and name.endswith("_") and not name.startswith("_"):
                yield f"{inside}.{name}", value


def test_every_launcher_has_a_row(house: list[Kernel]) -> None:
    registered = {id(row.function) for row in house}
    missing = [name for name, value in launchers() if id(value) not in registered]
    assert missing == []


def test_every_operation_has_a_kernel_of_ours_that_claims_every_dtype(house: list[Kernel]) -> None:
    for operation in HOUSE:
        rows = [row for row in house if row.operation is operation]
        assert {dtype for row in rows for dtype in row.dtypes} == set(operation.combinations)
        assert all(row.arithmetic == "exact" for row in rows)
    names = [operation.name for operation in HOUSE]
    assert sorted(FILES) == sorted(names)


def test_a_repro_file_finds_our_own_kernels(house: list[Kernel]) -> None:
    for kernel in house:
        backend = kernel.name.partition(".")[0]
        native = {"cpu": CPU, "cuda": CUDA}.get(backend)
        folder, files = (KERNELS / backend, native.files) if native else (KERNELS, FILES)
        assert kernel.file.resolve() == folder / f"{files[kernel.operation.name]}.py"


def test_names_are_unique(house: list[Kernel]) -> None:
    names = [row.name for row in house]
    assert len(names) == len(set(names))


def test_registering_the_house_twice_changes_nothing(house: list[Kernel]) -> None:
    register_house()
    assert list(kernels()) == house


def test_a_registered_function_stays_a_function() -> None:
    with registrations() as found:
        assert register("accumulate", name="a")(mine) is mine
        assert not found
    assert [row.name for row in found] == ["a"]
    assert "a" not in {row.name for row in kernels()}


def test_defaults_claim_what_the_operation_has() -> None:
    with registrations() as found:
        register("accumulate")(mine)
    (row,) = found
    assert (row.name, row.arithmetic, row.dtypes) == ("mine", "bounded", ("fp16", "bf16", "fp32"))
    assert row.layouts == ("flat", "list")
    assert row.file == Path(__file__)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"operation": "adamw"}, 'operation "adamw" is unknown, but should be one of sgd_step'),
        ({"dtypes": ("float8",)}, 'dtypes has "float8", but should be among fp32, fp16, bf16'),
        ({"dtypes": ()}, "dtypes is empty"),
        ({"layouts": ("tree",)}, 'layouts has "tree"'),
        ({"engines": ("tpu",)}, 'engines has "tpu"'),
        ({"arithmetic": "sloppy"}, 'arithmetic has "sloppy"'),
        ({"operation": "unscale"}, "mine has accumulators as positional argument 1, not grads"),
        ({"operation": "sgd_step"}, "mine has accumulators as positional argument 1, not params"),
    ],
)
def test_a_wrong_registration_is_refused_in_one_sentence(
    arguments: dict[str, object], says: str
) -> None:
    operation = str(arguments.pop("operation", "accumulate"))
    with registrations(), pytest.raises(UsageError) as caught:
        register(operation, **arguments)(mine)  # type: ignore[arg-type]
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "test_registry.py" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_taken_name_is_refused() -> None:
    with registrations():
        register("accumulate")(mine)
        with pytest.raises(UsageError, match='kernel "mine" is registered already at'):
            register("accumulate")(mine)


def without_found_inf(grads: list[torch.Tensor], *, inv_scale: torch.Tensor) -> None:
    """Lacks a control."""


def with_one_more(
    grads: list[torch.Tensor], *, inv_scale: object, found_inf: object, x: int
) -> None:
    """Has an argument that nobody passes."""


def with_default(
    grads: list[torch.Tensor], *, inv_scale: object, found_inf: object, block: int = 256
) -> None:
    """Has a tuning parameter."""


def test_missing_and_unknown_arguments_are_named() -> None:
    with registrations():
        with pytest.raises(UsageError, match="lacks the keyword argument found_inf"):
            register("unscale")(without_found_inf)
        with pytest.raises(UsageError, match="unknown argument x without a default"):
            register("unscale")(with_one_more)
        register("unscale")(with_default)


def reference(values: list[torch.Tensor]) -> tuple[list[torch.Tensor]]:
    return ([value.clone() for value in values],)


def operation_of(**changed: object) -> Operation:
    from dataclasses import replace

    from twinstep.parity.operations.operation import ListArgument, Role

    base = replace(
        OTHER,
        name="identity",
        lists=(ListArgument(name="values", role=Role.VALUE),),
        writes=("values",),
        reference=reference,
        combinations={"fp32": {"values": (torch.float32,)}},
    )
    return replace(base, **changed)  # type: ignore[arg-type]


def test_an_operation_of_a_user_is_known_and_forgotten_with_its_block() -> None:
    with registrations():
        register_operation(operation_of())
        assert operations()[-1].name == "identity"
        with pytest.raises(UsageError, match="exists already"):
            register_operation(operation_of())
    assert "identity" not in {operation.name for operation in operations()}


def test_an_operation_with_an_unknown_law_or_output_is_refused() -> None:
    with registrations():
        with pytest.raises(UsageError, match='laws has "gravity"'):
            register_operation(operation_of(laws=("gravity",)))
        with pytest.raises(UsageError, match='writes has "thing"'):
            register_operation(operation_of(writes=("thing",)))
