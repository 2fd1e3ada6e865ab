"""DeepSpeed's engine with ZeRO and both of our sides, live on real ranks.

With `Compat.deepspeed()` scale, skipped steps, this rank's masters and all weights agree bit for
bit after every step, and norms within the bound of a sum of squares in fp32; where the norm decides
about the weights, those agree within what that allows. A difference beyond that has a row in
`zero_ledger`, and a row has a configuration that shows it, and that agrees without its option.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from twinstep.parity.proof.peers.zero_config import ZeroConfig, drawn
from twinstep.parity.proof.peers.zero_ledger import LEDGER
from twinstep.parity.proof.peers.zero_ranks import Judged, on_ranks
from twinstep.parity.proof.peers.zero_volume import Volume

CONFIGURATIONS = 60
STEPS = 6


@dataclass
class ZeroAgreement:
    """Agreement over all configurations.

    Attributes:
        kinds: stage, dtype and ranks -> configurations.
        steps: steps taken.
        skipped: steps that all skipped.
        exact: configurations whose weights agree bit for bit on both of our sides.
        within: configurations whose weights agree within the bound, for they were clipped.
        worst_norm: largest relative distance of two norms, over its bound.
        worst_weight: largest distance of two masters of clipped runs, over its bound.
        applies: row of the ledger -> configurations where it may show.
        shows: row of the ledger -> configurations where there is a difference.
        default_differs: configurations in which our default does otherwise.
        volumes: bytes of single steps.
        wrong: what no row explains, and rows that do not show, one sentence each.
    """

    kinds: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    skipped: int = 0
    exact: int = 0
    within: int = 0
    worst_norm: float = 0.0
    worst_weight: float = 0.0
    applies: dict[str, int] = field(default_factory=dict)
    shows: dict[str, int] = field(default_factory=dict)
    default_differs: int = 0
    volumes: list[Volume] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def agreed(seeds: Sequence[int] = range(CONFIGURATIONS), steps: int = STEPS) -> ZeroAgreement:
    """Run every configuration through DeepSpeed and both of our sides.

    Raises:
        RuntimeError: a rank failed or did not end.
    """
    ranks, volumes = on_ranks(seeds, steps)
    found = summed([drawn(seed, steps) for seed in seeds], [row for rank in ranks for row in rank])
    found.volumes = volumes
    return found


def summed(configs: Sequence[ZeroConfig], judged: Sequence[Judged]) -> ZeroAgreement:
    """Observations of all ranks together."""
    found = ZeroAgreement(
        applies=dict.fromkeys((row.name for row in LEDGER), 0),
        shows=dict.fromkeys((row.name for row in LEDGER), 0),
    )
    for config in configs:
        own = [row for row in judged if row.seed == config.seed]
        _add(found, config, own)
    found.wrong += [
        f"ZeRO: no configuration shows any longer that gradients are {name}"
        for name, count in found.shows.items()
        if not count
    ]
    return found


def _add(found: ZeroAgreement, config: ZeroConfig, own: Sequence[Judged]) -> None:
    """Count one configuration, as seen by its ranks."""
    found.kinds[config.kind] = found.kinds.get(config.kind, 0) + 1
    wrong = _said(own, "ZeRO")
    siblings = [row.sibling for row in own if row.sibling is not None]
    # What a row explains goes with its option; what stays is something else.
    found.wrong += _said(siblings, "ZeRO without known differences")[:1]
    names = [row.name for row in LEDGER if row.applies(config)]
    for name in names:
        found.applies[name] += 1
        found.shows[name] += bool(wrong)
    found.steps += own[0].steps
    found.skipped += own[0].skipped
    differs = any(row.default_differs for row in own)
    found.default_differs += differs
    if differs and not config.dynamic:
        wrong.append(f"ZeRO, configuration {config.seed}: our default differs without a scale")
    if wrong:
        found.wrong += [] if names else wrong[:1]
        return
    worst = max(row.worst_weight for row in own)
    found.worst_norm = max(found.worst_norm, *(row.worst_norm for row in own))
    found.worst_weight = max(found.worst_weight, worst)
    found.exact += worst == 0
    found.within += worst > 0


def _said(rows: Sequence[Judged], where: str) -> list[str]:
    return [
        f"{where}, {side}, {sentence}"
        for row in rows
        for side, said in row.wrong.items()
        for sentence in said
    ]
