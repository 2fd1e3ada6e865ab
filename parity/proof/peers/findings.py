"""Findings of the judge in other projects, and the meaning of each.

A finding explains broken laws. `parity peers` fails when a law is broken that no finding explains,
and when a finding explains nothing any more. The findings are in `findings.toml`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twinstep.parity.proof.peers.observe import Observation


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One explanation.

    Attributes:
        peers: whom it concerns.
        dtypes: on which dtype combinations; empty means all.
        laws: which laws it breaks; empty means any.
        kind: "another contract", "less accurate" or "a bug".
        says: one sentence.
        evidence: the smallest input and what came out.
    """

    peers: Sequence[str]
    dtypes: Sequence[str] = ()
    laws: Sequence[str] = ()
    kind: str
    says: str
    evidence: str

    def explains(self, peer: str, dtype: str, law: str) -> bool:
        """True if a broken law of a peer is this finding."""
        return (
            peer in self.peers
            and (not self.dtypes or dtype in self.dtypes)
            and (not self.laws or law in self.laws)
        )


FINDINGS = tuple(
    Finding(**row)
    for row in tomllib.loads(Path(__file__).with_name("findings.toml").read_text())["finding"]
)


def unexplained(seen: Sequence[Observation]) -> list[str]:
    """Broken laws without a finding, one sentence each."""
    return [
        f"{one.peer} [{one.dtype}] breaks `{law}` and no finding explains it: {text}"
        for one in seen
        for law, text in one.broken.items()
        if not any(finding.explains(one.peer, one.dtype, law) for finding in FINDINGS)
    ]


def idle(seen: Sequence[Observation]) -> list[str]:
    """Findings about peers that were judged and break nothing that they explain."""
    judged = {one.peer for one in seen}
    return [
        f"{name} no longer shows: {finding.says}"
        for finding in FINDINGS
        for name in finding.peers
        if name in judged
        and not any(
            finding.explains(one.peer, one.dtype, law)
            for one in seen
            if one.peer == name
            for law in one.broken
        )
    ]
