"""A plan as a source of the report: a file that `picompile plan` wrote."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from picompile.errors import UsageError
from picompile.placement.plan import SCHEMA, Plan

if TYPE_CHECKING:
    from picompile_runtime.fields import Fields

# Enough to tell a plan from a file of weights, which would take long to read.
_HEAD_BYTES = 64


@dataclass(frozen=True)
class PlanFacts:
    """A plan, and the file that it is from."""

    path: Path
    plan: Plan


def is_json_object(path: Path) -> bool:
    """Whether a file begins like one. Raises `UsageError` for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES).lstrip().startswith(b"{")
    except OSError as error:
        raise UsageError(f"{path}: not readable ({error.strerror})") from error


def read_plan_facts(path: Path) -> PlanFacts:
    """Reads the file of a plan. Raises `UsageError` for one that is damaged, or that is none."""
    from picompile.placement.plan_file import read_plan

    return PlanFacts(path, read_plan(path))


def plan_of_report(report: "Fields") -> Plan | None:
    """The plan in an artifact's report.json, None where there is none. Raises `ArtifactError` for a damaged one.

    It does not list the neurons on the GPU: they are in the artifact.
    """
    if report.data.get("plan") is None:
        return None
    from picompile.placement.plan_file import plan_of

    fields = report.object("plan")
    if fields.data.get("schema") != SCHEMA:
        raise fields.wrong("schema", f"{SCHEMA}; compile the model again")
    for layer in fields.objects("layers"):
        layer.data.setdefault("hot", None)
    return plan_of(fields)
