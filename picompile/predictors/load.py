"""Reading predictors: a folder with `predictors.json`, or a bare `predictors.safetensors`."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from picompile.checkpoint.headers import READ_ERRORS, TensorHeader, one_line, open_file
from picompile.errors import UsageError
from picompile.predictors.layer import PARTS, LayerPredictor, tensor_name
from picompile.predictors.loaded import Predictors

FORMAT = "picompile-predictors"
SCHEMA = 1
FACTS_FILE = "predictors.json"
WEIGHTS_FILE = "predictors.safetensors"

_DTYPES = ("F16", "BF16", "F32")
_NAME = re.compile(rf"layers\.(0|[1-9][0-9]*)\.({'|'.join(PARTS)})")


def load_predictors(path: Path | str) -> Predictors:
    """Reads the predictors of a folder, or of a bare safetensors file.

    A bare file (which `picompile synth` writes beside its checkpoint) is taken as kind `learned`, input `block`,
    threshold 0. Raises `UsageError`, in one line, for what is no such thing, is damaged, or holds values that are no
    numbers.
    """
    path = Path(path)
    facts = path / FACTS_FILE
    if facts.is_file():
        predictors = _described(path, _read_facts(facts))
    elif path.is_file() or (path / WEIGHTS_FILE).is_file():
        predictors = _bare(path, path if path.is_file() else path / WEIGHTS_FILE)
    else:
        raise UsageError(f"{path}: neither {FACTS_FILE} nor {WEIGHTS_FILE} is there; picompile train makes them")
    for name, header in predictors.headers.items():
        _require_finite(name, header)
    return predictors


def _described(folder: Path, facts: Mapping[str, Any]) -> Predictors:
    try:
        layers = tuple(LayerPredictor.from_json(entry) for entry in facts["layers"])
        model, gate, curves = facts["model"], facts.get("gate", {}), facts.get("curves", [])
        numbers = [layer.layer for layer in layers]
        if not layers or len(set(numbers)) != len(numbers):
            raise ValueError("no layers, or one of them twice")
        if not isinstance(model, dict) or not isinstance(gate, dict) or not isinstance(curves, list):
            raise ValueError("model, gate or curves has another form")
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder / FACTS_FILE}: not the facts of predictors: {one_line(error)}") from error
    learned = [layer for layer in layers if layer.learned]
    headers = _read_headers(folder / WEIGHTS_FILE) if learned else {}
    for layer in learned:
        _require_parts(folder / WEIGHTS_FILE, headers, layer.layer, layer.rank)
    wanted = {tensor_name(layer.layer, part) for layer in learned for part in PARTS}
    used = {name: header for name, header in headers.items() if name in wanted}
    described = (model.get("fingerprint"), model.get("name"), model.get("parameters"))
    return Predictors(folder, layers, used, *described, gate, curves)


def _bare(path: Path, file: Path) -> Predictors:
    headers = _read_headers(file)
    layers = []
    for number in sorted({int(match[1]) for name in headers if (match := _NAME.fullmatch(name))}):
        _require_parts(file, headers, number, None)
        fc1, fc2 = (headers[tensor_name(number, part)].shape for part in ("fc1", "fc2"))
        parameters = fc1[0] * fc1[1] + fc2[0] * fc2[1] + fc2[0]
        layers.append(LayerPredictor(number, "learned", "block", fc1[0], 0.0, parameters, 2 * parameters))
    if not layers:
        raise UsageError(f"{file}: holds no predictors: no tensor is called layers.N.fc1")
    return Predictors(path, tuple(layers), headers)


def _read_facts(file: Path) -> Mapping[str, Any]:
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UsageError(f"{file}: not readable as JSON: {one_line(error)}") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise UsageError(f"{file}: not the facts of predictors")
    if facts.get("schema") != SCHEMA:
        raise UsageError(f"{file}: schema {facts.get('schema')!r}; this version reads {SCHEMA}; train again")
    return facts


def _read_headers(file: Path) -> dict[str, TensorHeader]:
    try:
        with open_file(file) as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (a handle is no mapping)
            headers = {name: TensorHeader(file, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except READ_ERRORS as error:
        raise UsageError(f"{file}: cannot be read as predictors: {one_line(error)}") from error
    return {name: header for name, header in headers.items() if _NAME.fullmatch(name)}


def _require_parts(file: Path, headers: Mapping[str, TensorHeader], layer: int, rank: int | None) -> None:
    """Holds the three tensors of a layer against each other, and against the rank that the facts give."""
    names = [tensor_name(layer, part) for part in PARTS]
    for name in names:
        if name not in headers:
            raise UsageError(f"{file}: holds no tensor {name}")
        if headers[name].dtype not in _DTYPES:
            raise UsageError(f"{file}: {name} is {headers[name].dtype}; only {', '.join(_DTYPES)} are read")
    fc1, fc2, bias = (headers[name].shape for name in names)
    whole = len(fc1) == len(fc2) == 2 and fc1[0] == fc2[1] == (rank or fc1[0]) and bias == fc2[:1] and fc1[0] > 0
    if not whole:
        shapes = ", ".join(f"{part} {list(shape)}" for part, shape in zip(PARTS, (fc1, fc2, bias), strict=True))
        of = "" if rank is None else f" of rank {rank}"
        raise UsageError(f"{file}: layer {layer}: {shapes} do not make a predictor{of}")


def _require_finite(name: str, header: TensorHeader) -> None:
    try:
        with open_file(header.file) as handle:
            finite = bool(torch.isfinite(handle.get_tensor(name)).all())
    except READ_ERRORS as error:
        raise UsageError(f"{header.file}: cannot read {name}: {one_line(error)}") from error
    if not finite:
        raise UsageError(f"{header.file}: {name} holds values that are no numbers; train again")
