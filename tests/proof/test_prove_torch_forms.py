"""Names of torch's fused operations have the bits that torch computes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from twinstep.parity.prove.host_numbers import HostReads
from twinstep.parity.prove.torch_forms import form
from twinstep.parity.prove.torch_names import TorchNames
from twinstep.replay.names.evaluate import evaluate
from twinstep.replay.names.naming import granules_of, naming, set_names
from twinstep.replay.names.session import NotNamed, Session

Operation = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
OPERATIONS: dict[str, Operation] = {
    "addcmul": lambda a, b, c, x: torch.addcmul(a, b, c),
    "addcmul value": lambda a, b, c, x: a.clone().addcmul_(b, c, value=x.item()),
    "addcmul tensor": lambda a, b, c, x: a.addcmul(b, c, value=x),  # type: ignore[arg-type]
    "addcdiv": lambda a, b, c, x: torch.addcdiv(a, b, c, value=-x.item()),
    "add": lambda a, b, c, x: a.add(b, alpha=-0.3),
    "add alpha": lambda a, b, c, x: a.clone().add_(b, alpha=x.item()),
    "sub alpha": lambda a, b, c, x: torch.sub(a, b, alpha=x.item()),
    "lerp": lambda a, b, c, x: torch.lerp(a, b, 0.3),
    "lerp far": lambda a, b, c, x: torch.lerp(a, b, 0.8),
    "lerp weight": lambda a, b, c, x: a.lerp(b, 1 - x.item()),
    "lerp tensor": lambda a, b, c, x: torch.lerp(a, b, c),
    "integers": lambda a, b, c, x: (
        ((a.view(torch.int32).long() << 16) + b.view(torch.int32))
        .bitwise_and(0xFFFFFFFFFF)
        .sub(2**35)
        .bitwise_right_shift(7)
        .int()
    ),
    "integers of 16 bits": lambda a, b, c, x: (
        a.view(torch.int16).int() - (b.view(torch.int16) >> 3)
    ),
    "where not a number": lambda a, b, c, x: torch.where((a * torch.inf).isnan(), a, b),
    "number on the right": lambda a, b, c, x: a * x.item() + 1.0,
    "number on the left": lambda a, b, c, x: (2 - x.item()) * a,
}


def numbers_and_bits(operation: Operation) -> tuple[np.ndarray, np.ndarray]:
    """Bits of a result by its expressions, and as torch has computed them."""
    random = torch.Generator().manual_seed(3)
    session = Session()
    given = [torch.randn(37, generator=random) for _ in range(3)]
    given.append(torch.tensor(0.37, dtype=torch.float64))
    leaves: dict[int, np.ndarray] = {}
    with naming(session):
        for tensor in given:
            g = tensor.element_size() // 2
            own = [session.table.leaf("x", g) for _ in range(tensor.numel())]
            bits = np.ascontiguousarray(granules_of(tensor)).view(f"u{2 * g}").reshape(-1)
            leaves |= {n: np.array([[b]]) for n, b in zip(own, bits, strict=True)}
            set_names(session, tensor, np.array(own).reshape(tensor.shape))
        mode = TorchNames(session)
        with mode, HostReads(mode):
            result = operation(*given)
        names = mode.names(result).reshape(-1).tolist()
    assert min(names) >= 0
    values = evaluate(session.table, names, leaves)
    found = np.array([values[n].reshape(())[()] for n in names])
    return found, result.numpy().view(np.uint32)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_name_has_the_bits_that_torch_computes(name: str) -> None:
    found, expected = numbers_and_bits(OPERATIONS[name])
    assert np.array_equal(found, expected)


def test_a_form_is_known_and_is_that_of_the_machine() -> None:
    a, b = torch.tensor([1.0 + 2.0**-12]), torch.tensor([-1.0 - 2.0**-11])
    fused = float(torch.addcmul(b, a, a)) != 0.0
    assert form("addcmul", torch.float32) is form("lerp", torch.float32) is fused


@pytest.mark.parametrize(
    "operation",
    [
        lambda a, b, c, x: torch.addcmul(a, b[:1], c),
        lambda a, b, c, x: a.add(b[:1].expand(37), alpha=x.item()),
        lambda a, b, c, x: a.bfloat16().add(b.bfloat16(), alpha=0.3),
        lambda a, b, c, x: a.clamp(max=x.item()),
        lambda a, b, c, x: a * float(x.item()),
    ],
)
def test_what_is_not_known_is_refused(operation: Operation) -> None:
    with pytest.raises(NotNamed):
        numbers_and_bits(operation)
