"""Results of layers on disk: one file a layer, which appears whole or not at all."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from picompile.checkpoint.headers import READ_ERRORS, one_line, open_file
from picompile.errors import UsageError
from picompile.profiling.files import write_tensors
from picompile.training.candidates import Candidate, LayerResult
from picompile.training.curve import Curve

_FACTS = ("layer", "neurons", "hidden", "neuron_parameters", "decided_share", "skewness", "inputs")
_OF_CANDIDATE = ("kind", "input", "rank", "parameters")


def save_result(path: Path, result: LayerResult) -> None:
    """Writes a result to `path`."""
    tensors: dict[str, Tensor] = {}
    for number, candidate in enumerate(result.candidates):
        tensors |= {f"{number}.curve.{name}": tensor for name, tensor in candidate.curve.tensors().items()}
        tensors |= {f"{number}.{name}": tensor for name, tensor in candidate.weights.items()}
    facts = {name: getattr(result, name) for name in _FACTS}
    candidates = [{name: getattr(candidate, name) for name in _OF_CANDIDATE} for candidate in result.candidates]
    write_tensors(path, tensors, {"facts": json.dumps(facts), "candidates": json.dumps(candidates)})


def load_result(path: Path) -> LayerResult:
    """Reads what `save_result` wrote, without the candidates' weights. Raises `UsageError` for what is damaged."""
    try:
        with open_file(path) as file:
            metadata, names = file.metadata(), [name for name in file.keys() if ".curve." in name]  # noqa: SIM118
            tensors = {name: file.get_tensor(name).clone() for name in names}
        candidates = [
            Candidate(**facts, curve=_curve(tensors, number), weights={})
            for number, facts in enumerate(json.loads(metadata["candidates"]))
        ]
        return LayerResult(**json.loads(metadata["facts"]), candidates=tuple(candidates))
    except (*READ_ERRORS, KeyError, TypeError) as error:
        raise UsageError(f"{path}: damaged: {one_line(error)}; remove it, and train goes on") from error


def load_weights(path: Path, number: int) -> dict[str, Tensor]:
    """fc1, fc2 and bias of candidate `number`, mapped from the file. Raises `UsageError` for what is damaged."""
    try:
        with open_file(path) as file:
            return {name: file.get_tensor(f"{number}.{name}") for name in ("fc1", "fc2", "bias")}
    except READ_ERRORS as error:
        raise UsageError(f"{path}: damaged: {one_line(error)}; remove it, and train goes on") from error


def _curve(tensors: dict[str, Any], number: int) -> Curve:
    names = ("computed", "fired", "found", "total")
    return Curve.of_tensors({name: tensors[f"{number}.curve.{name}"] for name in names})
