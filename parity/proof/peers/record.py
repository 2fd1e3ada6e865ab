"""The committed observations: written by `parity peers --record`, read by the page and tests."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from twinstep.parity.proof.peers.edge_scene import Shown
from twinstep.parity.proof.peers.edge_training import Trained
from twinstep.parity.proof.peers.installed import installed_version
from twinstep.parity.proof.peers.live import Agreement
from twinstep.parity.proof.peers.observe import Observation
from twinstep.parity.proof.peers.peer import Peer
from twinstep.parity.proof.peers.zero_live import ZeroAgreement
from twinstep.parity.proof.peers.zero_volume import Volume

FILE = Path(__file__).with_name("observed.json")
EDGES = Path(__file__).with_name("edges.json")
ZERO = Path(__file__).with_name("zero.json")
SCHEMA = 1


def live() -> Agreement:
    """Observations of the runs beside DeepSpeed's optimizers."""
    return Agreement(**json.loads(FILE.read_text())["live"])


def recorded() -> tuple[dict[str, str], list[Observation], dict[str, str]]:
    """Versions, observations, and why the rest could not be judged."""
    data = json.loads(FILE.read_text())
    if data["schema"] != SCHEMA:
        raise ValueError(f"{FILE.name} has schema {data['schema']}, but should have {SCHEMA}.")
    rows = [Observation(**{**row, "kept": tuple(row["kept"])}) for row in data["observations"]]
    return data["versions"], rows, data["missing"]


def record(chosen: Sequence[Peer], seen: Sequence[Observation], agreement: Agreement) -> None:
    """Write what was observed, with the versions it holds for."""
    judged = {one.peer for one in seen}
    versions = {peer.package: peer.version() for peer in chosen if peer.name in judged}
    data = {
        "schema": SCHEMA,
        "command": "parity peers --record",
        "versions": {"python": platform.python_version(), **versions},
        "missing": {peer.name: peer.missing() for peer in chosen if peer.missing()},
        "live": asdict(agreement),
        "observations": [asdict(one) for one in seen],
    }
    _write(FILE, data)


def recorded_edges() -> tuple[list[Shown], list[Trained]]:
    """Observations of the scenes and of the training runs."""
    data = json.loads(EDGES.read_text())
    return [Shown(**row) for row in data["edges"]], [Trained(**row) for row in data["training"]]


def record_edges(seen: Sequence[Shown], runs: Sequence[Trained]) -> None:
    """Write what the scenes and the training runs showed."""
    data = {
        "command": "parity peers --edges --record",
        "deepspeed": installed_version("deepspeed"),
        "edges": [asdict(one) for one in seen],
        "training": [asdict(one) for one in runs],
    }
    _write(EDGES, data)


def recorded_zero() -> ZeroAgreement:
    """Observations of the runs with ZeRO."""
    data = json.loads(ZERO.read_text())["zero"]
    return ZeroAgreement(**{**data, "volumes": [Volume(**row) for row in data["volumes"]]})


def record_zero(seen: ZeroAgreement) -> None:
    """Write what the runs with ZeRO showed."""
    data = {
        "command": "parity peers --zero --record",
        "deepspeed": installed_version("deepspeed"),
        "torch": installed_version("torch"),
        "zero": asdict(seen),
    }
    _write(ZERO, data)


def _write(file: Path, data: Mapping[str, object]) -> None:
    file.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
