"""Larger predictors for some layers, from the candidates that training kept."""

from collections.abc import Sequence
from pathlib import Path

from picompile.errors import UsageError
from picompile.output import reserve
from picompile.predictors import Predictors, load_predictors
from picompile.training.assemble import assemble
from picompile.training.results import load_result
from picompile.training.selection import Selection
from picompile.training.workplace import Workplace


def tighten(folder: Path, layers: Sequence[int]) -> Predictors | None:
    """Chooses predictors that miss half as much in `layers`, in the folder that `train_predictors` made.

    Nothing is trained. Within the budget that training was given, the predictors of other layers may become smaller;
    their targets stay. None where that changes nothing: the layers are exact already, or the folder's candidates are
    gone. Raises `UsageError` for a folder that holds no predictors.
    """
    place, current = Workplace(folder), load_predictors(folder)
    selection = Selection.read(place)
    if selection is None or not all(place.layer_file(layer.layer).is_file() for layer in current.layers):
        return None
    if unknown := sorted(set(layers) - selection.targets.keys()):
        raise UsageError(f"{folder}: has no layer {unknown[0]}")
    with reserve(folder.resolve(), overwrite=True) as reserved:
        results = [load_result(place.layer_file(layer.layer)) for layer in current.layers]
        tighter = selection.tightened(layers)
        try:
            if not selection.changes(tighter, results):
                return None
        except UsageError:
            return None
        tighter.write(place, current.gate)
        places = {result.layer: place.layer_file(result.layer) for result in results}
        model = {"fingerprint": current.fingerprint, "name": current.name, "parameters": current.model_parameters}
        # What the gate found was of the choice before.
        targets = {"targets": [tighter.targets[result.layer] for result in results]}
        with place.publishing(reserved) as new:
            assemble(new, results, tighter.choices(results), places, model, targets)
    return load_predictors(folder)
