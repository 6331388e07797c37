"""`picompile doctor`: say what this machine can run, and check that picompile works on it."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from picompile.cli.doctor_findings import examine
from picompile.cli.doctor_show import details, missing_parts, models_table, summary
from picompile.cli.options import DebugOption, JsonOption
from picompile.cli.progress import progress
from picompile.errors import PicompileError

if TYPE_CHECKING:
    from picompile.machine.measured import LocalMachine
    from picompile.placement.estimates import Estimate


class UnfitMachineError(PicompileError):
    """This machine lacks something that compiling or running needs."""

    exit_code = 6


def doctor_command(
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure memory and GPU again, even if they were measured before.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Show every finding: instruction sets, versions, speeds.")
    ] = False,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Say what this machine can run, how fast, and what picompile lacks on it.

    The speed of memory is measured, and that of a GPU once; both are kept in the
    cache folder. Speeds of models are predicted from them. Ends with exit code 6
    where something is missing.

    \b
    Examples:
      picompile doctor
      picompile doctor --verbose
      picompile doctor --measure
      picompile doctor --json
    """
    from picompile.machine.measured import measure_local, with_faster_host

    with progress() as shown, shown.step("measure memory and GPU"):
        local = with_faster_host(measure_local(anew=measure))
    findings, estimates = list(examine(local)), _estimates(local)
    if json_output:
        facts: dict[str, object] = {finding.name: finding.value for finding in findings}
        facts["missing"] = [finding.missing for finding in findings if finding.missing]
        facts["local"] = _local_facts(local)
        facts["models"] = [asdict(each) | {"verdict": each.verdict} for each in estimates]
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        from picompile.machine.host import host_memory

        parts = [summary(local, host_memory()[1]), models_table(estimates), missing_parts(findings)]
        parts += [details(findings)] if verbose else []
        print("\n\n".join(filter(None, map("\n".join, parts))))
    if missing := [finding.missing for finding in findings if finding.missing]:
        raise UnfitMachineError("; ".join(missing))


def _estimates(local: "LocalMachine") -> list["Estimate"]:
    """Return the estimates for well-known models on this machine; none if packages of the planner are missing."""
    try:
        from picompile.placement.estimates import estimate
    except ModuleNotFoundError:
        return []
    from picompile.placement.known_models import known_models
    from picompile.placement.machine import MachineOptions, measured_machine

    machine = measured_machine(MachineOptions(), local).machine
    return [estimate(model, machine) for model in known_models()]


def _local_facts(local: "LocalMachine") -> dict[str, object]:
    """Return the measurements as numbers: the target `local` and the host's memory."""
    return {
        "target": asdict(local.target),
        "host_bytes": local.host.bytes,
        "host_bytes_per_s": local.host.bytes_per_s,
        "host_scattered_share": local.host.scattered_share,
        "gpu": None if local.speed is None else asdict(local.speed),
        "no_gpu": local.no_gpu,
        "measured_at_s": local.measured_at_s,
    }
