"""Commands that judge the judge, and hold ours against others: mutate, peers, model-check, ..."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twinstep.parity.cli.app import JobsFlag, JsonFlag, LawFlag, Names, OpFlag, QuickFlag

proof = typer.Typer()


@proof.command()
def mutate(
    op: OpFlag = None,
    law: LawFlag = None,
    only: Annotated[
        Names,
        typer.Option("--only", metavar="KIND", help="wrong, harmless or planted; may be repeated."),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option("--sample", min=0, metavar="N", help="Faults planted in our own source."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the sample.")] = 0,
    quick: QuickFlag = False,
    first: Annotated[
        bool, typer.Option("--first", help="Stop at the first law that kills.")
    ] = False,
    json: JsonFlag = None,
    jobs: JobsFlag = None,
) -> None:
    """Judge the judge: wrong kernels must die.

    What is harmless must pass; docs/guide/judge.md describes both.
    """
    from twinstep.parity.cli.judge_command import Outputs
    from twinstep.parity.proof.commands.mutate import Choice, run_mutate

    outputs = Outputs(json=json, jobs=jobs)
    names = {"operations": op, "laws": law, "kinds": only}
    chosen = Choice(
        **{name: tuple(value or ()) for name, value in names.items()},
        sample=sample,
        seed=seed,
        quick=quick,
        first=first,
    )
    raise typer.Exit(run_mutate(chosen, outputs))


@proof.command(name="prove-mutants")
def prove_mutants(
    op: OpFlag = None,
    every: Annotated[
        int, typer.Option("--every", min=1, metavar="N", help="Every N-th fault alone.")
    ] = 1,
    json: JsonFlag = None,
    jobs: JobsFlag = None,
) -> None:
    """Plant faults in our arithmetic: none may stay proved.

    docs/guide/proof.md describes proofs.
    """
    from twinstep.parity.proof.commands.prove_mutants import run

    raise typer.Exit(run(tuple(op or ()), every, jobs, json))


@proof.command(name="sequence-power")
def sequence_power(
    most: Annotated[
        int, typer.Option("--most", min=1, metavar="N", help="Sequences for a class and dtype.")
    ] = 450,
    name: Annotated[
        Names, typer.Option("--class", metavar="NAME", help="A wrong class; may be repeated.")
    ] = None,
) -> None:
    """Measure how likely sequences notice wrong classes.

    docs/guide/adding-an-optimizer.md describes sequences.
    """
    from twinstep.parity.proof.commands.sequence_power import sequence_power as measured

    raise typer.Exit(measured(most, tuple(name or ())))


@proof.command(name="compile")
def compile_(
    target: Annotated[
        Names,
        typer.Option(
            "--target", metavar="NAME", help="sm_80, sm_90, sm_100, gfx942; default: all."
        ),
    ] = None,
    op: OpFlag = None,
    json: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="Write all facts as JSON here; - is standard output."
        ),
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Record what is found as the new ceilings.")
    ] = False,
) -> None:
    """Compile our kernels, held to ceilings.

    docs/reference/static-gates.md describes them.
    """
    from twinstep.parity.proof.commands.compile import compile_all

    raise typer.Exit(compile_all(target, op, json, update))


@proof.command(name="replay-conformance")
def replay_conformance(
    engine: Annotated[
        str, typer.Option("--engine", metavar="NAME", help="replay or cuda.")
    ] = "replay",
    opcode: Annotated[
        Names,
        typer.Option("--opcode", metavar="NAME", help="Beginning of an opcode; may be repeated."),
    ] = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="All 65,536 patterns of each 16-bit source.")
    ] = False,
    json: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="Write every form as JSON here; - is standard output."
        ),
    ] = None,
) -> None:
    """Hold every opcode form to its meaning.

    replay/README.md and docs/reference/engines.md describe the suite.
    """
    from twinstep.parity.proof.commands.replay_conformance import conformance

    raise typer.Exit(conformance(engine, opcode or (), thorough, json))


@proof.command()
def peers(
    package: Annotated[
        str | None,
        typer.Option("--package", metavar="NAME", help="Judge the peers of this package alone."),
    ] = None,
    record: Annotated[
        bool,
        typer.Option("--record", help="Write what is observed and docs/reference/peers.md anew."),
    ] = False,
    edges: Annotated[
        bool, typer.Option("--edges", help="Run the ten edges beside DeepSpeed, and nothing else.")
    ] = False,
    zero: Annotated[
        bool, typer.Option("--zero", help="Run ZeRO beside DeepSpeed's, and nothing else.")
    ] = False,
) -> None:
    """Judge other projects' optimizers and scalers.

    docs/reference/peers.md describes what is judged, and has the results.
    """
    from twinstep.parity.proof.commands.peers import judge_peers, show_edges, show_zero

    if edges or zero:
        raise typer.Exit(show_edges(record) if edges else show_zero(record))
    raise typer.Exit(judge_peers(package, record))


@proof.command(name="model-check")
def model_check(
    depth: Annotated[
        int, typer.Option("--depth", min=1, metavar="N", help="Steps from a first state.")
    ] = 20,
    sample: Annotated[
        int, typer.Option("--sample", min=1, metavar="N", help="Every Nth configuration alone.")
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="For witnesses of differences."),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write golden/witnesses anew.")] = False,
) -> None:
    """Explore every state of the loss scalers.

    golden/README.md describes it.
    """
    from twinstep.parity.proof.commands.model_check import model_check as run

    raise typer.Exit(run(depth, sample, write, out))
