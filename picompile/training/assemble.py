"""From a choice to predictors: the files of the result."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from picompile.predictors import LayerPredictor, Predictors, load_predictors
from picompile.predictors.layer import tensor_name
from picompile.predictors.load import FACTS_FILE
from picompile.predictors.save import write_predictors
from picompile.training.candidates import LayerResult
from picompile.training.choose import Choice, described
from picompile.training.results import load_weights


class _Chosen(Mapping[str, Tensor]):
    """The tensors of chosen candidates, read from the layers' files when they are asked for."""

    def __init__(self, places: Mapping[int, Path], choices: Sequence[Choice]) -> None:
        self._places = places
        self._numbers = {choice.layer: choice.candidate for choice in choices if choice.candidate is not None}
        self._held: tuple[int, Mapping[str, Tensor]] = (-1, {})

    def __getitem__(self, name: str) -> Tensor:
        _, layer, part = name.split(".")
        number = int(layer)
        if self._held[0] != number:
            self._held = number, load_weights(self._places[number], self._numbers[number])
        return self._held[1][part]

    def __iter__(self) -> Iterator[str]:
        return (tensor_name(layer, part) for layer in self._numbers for part in ("fc1", "fc2", "bias"))

    def __len__(self) -> int:
        return 3 * len(self._numbers)


def assemble(
    folder: Path,
    results: Sequence[LayerResult],
    choices: Sequence[Choice],
    places: Mapping[int, Path],
    model: Mapping[str, Any],
    gate: Mapping[str, Any],
) -> Predictors:
    """Writes the chosen predictors to `folder`, `predictors.json` last, and reads them back."""
    layers = [described(result, choice) for result, choice in zip(results, choices, strict=True)]
    (folder / FACTS_FILE).unlink(missing_ok=True)
    write_predictors(folder, layers, _Chosen(places, choices), model, gate, curves(results))
    return load_predictors(folder)


def curves(results: Sequence[LayerResult]) -> list[dict[str, Any]]:
    """The trade-offs of all candidates, for reports."""
    return [
        {
            "layer": result.layer,
            "kind": candidate.kind,
            "input": candidate.input,
            "rank": candidate.rank,
            "parameters": candidate.parameters,
            "firing_share": candidate.curve.firing_share,
            "points": candidate.curve.shown(),
        }
        for result in results
        for candidate in result.candidates
    ]


def key_of(layers: Sequence[LayerPredictor]) -> str:
    """A text that is the same for the same choice."""
    return "|".join(f"{layer.layer}:{layer.kind}:{layer.rank}:{layer.threshold:.9g}" for layer in layers)
