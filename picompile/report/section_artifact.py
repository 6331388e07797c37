"""The section of an artifact: its parts, kinds and bytes, what its predictors cost, and its plan."""

from picompile.report import numbers
from picompile.report.artifact import ArtifactFacts
from picompile.report.artifact_pictures import bytes_picture
from picompile.report.blocks import UNFOLDED, Part, Pictures, Section, Table
from picompile.report.gate import gate_table
from picompile.report.numbers import NOTHING
from picompile.report.section_plan import plan_parts
from picompile.report.section_predictors import accuracy_pictures, kinds_text, layers_table

_COLUMNS = ("layer", "part", "neurons", "predictor", "weights", "of the predictor")

_WORDS = "Measured on held-out text, with the predictors of all layers in place."


def artifact_section(anchor: str, artifact: ArtifactFacts) -> Section:
    """Gate, accuracy per layer, bytes and parts."""
    manifest, accuracy = artifact.manifest, artifact.accuracy
    model = {name: manifest.model.get(name, NOTHING) for name in ("name", "layers", "hidden", "ffn", "activation")}
    facts = [
        ("model", str(model["name"])),
        ("shape", f"layers {model['layers']}, hidden {model['hidden']}, ffn {model['ffn']} ({model['activation']})"),
        ("weights", f"{manifest.quant}, {numbers.size(sum(artifact.operator_bytes.values()))}"),
        ("predictor", kinds_text([part.predictor for part in artifact.parts])),
        ("context", f"{manifest.context:,} tokens, cache in {manifest.kv_dtype}"),
        ("code", ", ".join(variant.isa for variant in manifest.code)),
        ("files", numbers.size(sum(entry.size_bytes for entry in manifest.files.values()))),
    ]
    gate = gate_table({**accuracy.figures, "text": accuracy.text}, accuracy.layers) if accuracy is not None else None
    pictures = accuracy_pictures(anchor, accuracy.layers) if accuracy is not None else []
    pictures.append(bytes_picture(f"{anchor}-bytes", artifact.operator_bytes))
    parts: list[Part] = [*([] if gate is None else [gate]), Pictures(pictures), _parts_table(artifact)]
    if accuracy is not None and accuracy.layers:
        parts.append(layers_table(accuracy.layers, _WORDS))
    if artifact.plan is not None:
        parts += plan_parts(anchor, artifact.plan)
    return Section(anchor, "artifact", str(artifact.path), facts, parts)


def _parts_table(artifact: ArtifactFacts) -> Table:
    rows, seen = [], set()
    for part in artifact.parts:
        # A predictor serves all parts of its layer, and is named once.
        predictor = None if part.layer in seen else artifact.predictor_bytes.get(part.layer)
        seen.add(part.layer)
        weights, of_predictor = numbers.size(part.weight_bytes), numbers.size(predictor)
        rows.append((str(part.layer), part.part, f"{part.neurons:,}", part.predictor, weights, of_predictor))
    texts = frozenset({"part", "predictor"})
    folded = len(rows) > UNFOLDED
    return Table("Feed-forward parts", _COLUMNS, rows, texts, folded=folded).without_empty(NOTHING)
