"""The compiler driver: from a checkpoint to an artifact, in numbered steps.

1. capture    the model becomes an FX graph, without weights
2. predictors where they are trained: profile, train, or what a folder has of both (`picompile.prediction`)
3. passes     canonical → predicted → partitioned → quantized
4. lower      kernel calls, packed weights, planned buffers
5. kernels    TVM compiles them for each instruction set, gcc links them with the thread pool
6. weights    each tensor is read, transformed and written, one at a time
7. gate       perplexity with the predictors against every neuron; too far off, and larger predictors go back to 3
8. manifest   sizes and hashes; the folder is renamed into place
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picompile.errors import AccuracyGateError, UsageError
from picompile.progress import NoProgress, Progress
from picompile.targets import find_compiled_targets, gpu_of

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from picompile.capture import Captured
    from picompile.capture.facts import ModelFacts
    from picompile.code import Code
    from picompile.hot_device import DeviceTarget
    from picompile.placement.plan import Plan
    from picompile.prediction import Prediction
    from picompile_codegen.lower import Lowered
    from picompile_codegen.program import Program
    from picompile_passes.infra import Pass
    from picompile_passes.stages import Stage

HOT_DEVICES = ("cuda", "cpu")
QUANTIZATIONS = ("f16", "q8", "q4")
PREDICTORS = ("exact", "learned", "sign", "none")
_LOSSLESS = (None, "exact", "none")
_TRAINED = ("learned", "sign")
KV_DTYPES = {"f16": "float16", "f32": "float32", "q8": "q8"}
DEFAULT_CONTEXT = 4096
MOST_SEQUENCES = 256
DEFAULT_GATE = 0.001
CHUNK = 64
# Of a tensor: indices have 32 bits.
_MOST_ELEMENTS = 2**31 - 1


@dataclass(frozen=True)
class CompileOptions:
    """What to compile for.

    `target` names rows of the table of targets, several with commas between them; the artifact has code for each.

    `predictor` None chooses `exact` where the activation leaves neurons silent and `none` elsewhere. `learned`, `sign`
    and what plug-ins add leave out neurons, and pass a gate: with them, perplexity on held-out text may rise by the
    share `gate` at most, None for whatever it comes to. `learned` ones come from the folder `predictors`; or they, and
    the thresholds of `sign`, are trained on the profile in the folder `profile`, or on one made from the text files
    `calibration`. `work` keeps these stages for the next time.

    `context` in tokens; None takes the model's own limit, at most 4096. `sequences` are how many the cache holds, each
    with a context of its own; they can be decoded together. `kv_dtype` is f16, f32 or q8; None takes f16, and
    f32 where rounding would move neurons across a jump of the activation (FATReLU). `hot` maps a layer to the neurons
    of its hot part; or `plan`, which is of this model's neurons, says which are hot.

    `hot_device` is where hot neurons go: `cuda`, a GPU, for targets that have one unless it is said otherwise; `cpu`, a
    second partition of the CPU, for the same schedule without a GPU; None, where both parts run one after the other on
    the CPU. With `plan` the rest of the model goes where the plan has it; without, the device has all but embeddings
    and cold neurons, and layers that `hot` does not name are hot altogether.

    `passes` are extra passes as text, `name{option=value}@stage`, options and stage as needed: each runs as soon as the
    graph is at that stage, or else the one it requires. `dump_ir` receives the graph after every pass.
    """

    target: str = "cpu"
    quant: str = "q4"
    predictor: str | None = None
    context: int | None = None
    sequences: int = 1
    kv_dtype: str | None = None
    chunk: int = CHUNK
    hot: Mapping[int, Sequence[int]] = field(default_factory=dict)
    plan: "Plan | None" = None
    hot_device: str | None = None
    passes: tuple[str, ...] = ()
    dump_ir: Path | None = None
    verify: bool = True
    overwrite: bool = False
    predictors: Path | None = None
    profile: Path | None = None
    calibration: tuple[Path, ...] = ()
    gate: float | None = DEFAULT_GATE
    gate_tokens: int = 4096
    work: Path | None = None

    def __post_init__(self) -> None:
        """Refuses what no model can be compiled with. Raises `UsageError`."""
        find_compiled_targets(self.target)
        for value, known, name in (
            (self.quant, QUANTIZATIONS, "quantization"),
            (self.predictor, (None, *_predictors(self.predictor)), "predictor"),
            (self.kv_dtype, (None, *KV_DTYPES), "KV cache type"),
            (self.hot_device, (None, *HOT_DEVICES), "hot device"),
        ):
            if value not in known:
                raise UsageError(f"unknown {name} {value!r}; known are {', '.join(k for k in known if k)}")
        given = {"predictors": self.predictors, "profile": self.profile, "calibration text": self.calibration}
        for what, wanted in given.items():
            if wanted and self.predictor not in _TRAINED:
                raise UsageError(f"{what} given, but predictor {self.predictor or 'auto'} needs none; choose learned")
        if self.gate_tokens < 2:
            raise UsageError(f"the gate must read at least 2 tokens, not {self.gate_tokens}")
        if self.context is not None and self.context < 1:
            raise UsageError(f"the context must be at least 1 token, not {self.context}")
        if not 1 <= self.sequences <= MOST_SEQUENCES:
            raise UsageError(f"the cache can hold from 1 to {MOST_SEQUENCES} sequences, not {self.sequences}")
        if self.chunk < 2:
            raise UsageError(f"the prefill chunk must be at least 2 tokens, not {self.chunk}")
        if self.plan is not None:
            self._require_neurons(self.plan)
        if self.hot_device == "cuda" and gpu_of(self.target) is None:
            raise UsageError(f"hot device cuda needs a target with a GPU, and {self.target} has none")

    def _require_neurons(self, plan: "Plan") -> None:
        if self.hot:
            raise UsageError("hot neurons and a plan, which has its own; give one of them")
        if any(layer.hot is None for layer in plan.layers):
            raise UsageError(
                f"the plan of {plan.model} is made of {plan.firing}, which says nothing of single neurons; plan with "
                f"the model and its profile"
            )

    @property
    def hot_neurons(self) -> Mapping[int, Sequence[int]]:
        """Layer → the neurons of its hot part, from `hot` or `plan`."""
        return self.hot if self.plan is None else self.plan.hot_neurons()

    @property
    def device(self) -> str | None:
        """The hot device: what was asked for, or the target's GPU."""
        return self.hot_device or ("cuda" if gpu_of(self.target) is not None else None)


def _predictors(wanted: str | None) -> tuple[str, ...]:
    """The kinds that can be asked for: ours, and those of plug-ins, which are only looked for where it is none of ours.

    A kind with weights of its own comes with the folder that holds them.
    """
    if wanted is None or wanted in PREDICTORS:
        return PREDICTORS
    from picompile_passes.predictors import predictor_kind, predictor_kinds

    others = [name for name in predictor_kinds() if name not in PREDICTORS]
    return (*PREDICTORS, *(name for name in others if predictor_kind(name).parameters is None))


def compile_model(
    model: "str | os.PathLike[str] | Captured",
    output: str | os.PathLike[str],
    options: CompileOptions | None = None,
    progress: Progress | None = None,
) -> None:
    """Compiles `model`, an HF folder or what `picompile.capture.capture_module` returned, into the artifact `output`.

    Raises `UsageError` (2), `UnsupportedModelError` (3), `DoesNotFitError` (5), or `MachineError` or `ToolchainError`
    (6) where the code cannot be made here; each before anything is written.
    """
    options, progress, output = options or CompileOptions(), progress or NoProgress(), Path(output)
    from picompile.artifact_writer import check_output
    from picompile.code import code_to_measure, planned_code
    from picompile.hot_device import device_target

    check_output(output, options.overwrite)
    # Before the model is captured, which takes longer than to tell that a pass is not known.
    pipeline_passes(options)
    code, device = planned_code(options.target), device_target(options)
    if options.predictor not in _LOSSLESS:
        code_to_measure(code)
    if isinstance(model, str | os.PathLike):
        _check_plan_model(options.plan, Path(model))
        folder, captured = Path(model), _capture(Path(model), progress)
    else:
        folder, captured = None, model
    source = _Source(captured, folder, _context(captured, options), code, device)
    if options.plan is not None:
        _check_plan(options.plan, source, options, progress)
    if options.predictor in _LOSSLESS:
        _compile(source, None, output, options, progress)
        return
    from picompile.prediction import find_prediction

    with find_prediction(folder, captured, output, options, progress) as prediction:
        _compile_gated(source, prediction, output, options, progress)


@dataclass(frozen=True)
class _Source:
    """What is compiled. `folder` is the checkpoint's, where there is one; `code` is what the artifact shall have."""

    captured: "Captured"
    folder: Path | None
    context: int
    code: "Sequence[Code]"
    device: "DeviceTarget | None"


@dataclass(frozen=True)
class _Compiled:
    """All that an artifact is written from."""

    source: _Source
    prediction: "Prediction | None"
    graph_module: "GraphModule"
    lowered: "Lowered"


def _compile(
    source: _Source, prediction: "Prediction | None", output: Path, options: CompileOptions, progress: Progress
) -> None:
    insert, facts = None if prediction is None else prediction.insert_pass(), source.captured.facts
    graph_module = _run_passes(pipeline_passes(options, insert, facts), source.captured, options, progress)
    lowered = _lower(graph_module, source, options, progress)
    _write(_Compiled(source, prediction, graph_module, lowered), output, options, progress)


def _compile_gated(
    source: _Source, prediction: "Prediction", output: Path, options: CompileOptions, progress: Progress
) -> None:
    """Compiles; where the gate is not met, again with larger predictors for the layers to blame."""
    while True:
        try:
            return _compile(source, prediction, output, options, progress)
        except AccuracyGateError as error:
            larger = prediction.larger(error.layers)
            if larger is None:
                raise
            progress.say(f"{error}; trying larger predictors there")
            prediction = larger


def _capture(model: Path, progress: Progress) -> "Captured":
    from picompile.capture import load_model

    with progress.step("capture"):
        return load_model(model)


def _context(captured: "Captured", options: CompileOptions) -> int:
    limit = captured.facts.max_positions
    context = options.context or min(limit or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if limit is not None and context > limit:
        raise UsageError(f"a context of {context} tokens is more than the model's {limit} positions")
    elements = options.sequences * context * captured.facts.kv_heads * captured.facts.head_dim
    if elements > _MOST_ELEMENTS:
        raise UsageError(
            f"{_cache_text(options.sequences, context)} has {elements:,} elements a layer, and kernels count to "
            f"{_MOST_ELEMENTS:,}; choose fewer sequences or a smaller context"
        )
    return context


def _check_plan_model(plan: "Plan | None", folder: Path) -> None:
    """Raises `UsageError` for a plan of another checkpoint than `folder`."""
    if plan is None:
        return
    from picompile.checkpoint.fingerprint import fingerprint

    if plan.fingerprint != fingerprint(folder):
        raise UsageError(f"the plan is of another model ({plan.model!r}) than {folder}; plan this one")


def _check_plan(plan: "Plan", source: _Source, options: CompileOptions, progress: Progress) -> None:
    """Says where `plan` is not for what is compiled. Raises `UsageError` for other layers than the model's."""
    from picompile_passes.dialect.activations import parse_activation

    facts = source.captured.facts
    neurons = {layer.neurons for layer in plan.layers}
    if len(plan.layers) != facts.layers or neurons != {facts.ffn}:
        found = f"{len(plan.layers)} layers of {', '.join(map(str, sorted(neurons)))} neurons"
        raise UsageError(f"the plan is of {found}, but the model has {facts.layers} of {facts.ffn}; plan this one")
    predictor = options.predictor or ("exact" if parse_activation(facts.activation).sparse else "none")
    for what, planned, compiled in (
        ("weights in", plan.quant, options.quant),
        ("a context of", plan.context, source.context),
        ("predictor", plan.predictor, predictor),
        ("a batch of", plan.batch, options.sequences),
    ):
        if planned != compiled:
            progress.say(f"the plan is for {what} {planned}, but this compiles for {compiled}; its figures do not hold")


def pipeline_passes(
    options: CompileOptions, insert: "Pass | None" = None, facts: "ModelFacts | None" = None
) -> "list[Pass]":
    """The passes from captured to quantized, in order; `insert` is the one that puts lossy predictors in.

    With `facts`, those of the model, every layer gets its part where there is a hot device.
    """
    from picompile_passes.passes.canonicalize import CANONICALIZE
    from picompile_passes.passes.insert_predictors import InsertPredictors
    from picompile_passes.passes.partition import Partition
    from picompile_passes.passes.quantize import Quantize
    from picompile_passes.registry import make_pass

    hot = dict(options.hot_neurons)
    if facts is not None and options.device is not None and options.plan is None:
        hot = {layer: hot.get(layer, range(facts.ffn)) for layer in range(facts.layers)} | hot
    own = [
        *CANONICALIZE,
        insert or InsertPredictors(str(options.predictor) if options.predictor in ("exact", "none") else "auto"),
        Partition(hot),
        Quantize(options.quant),
    ]
    extra = [_with_stage(text) for text in options.passes]
    return _in_order(own, [(make_pass(name), stage) for name, stage in extra])


def _with_stage(text: str) -> "tuple[str, Stage | None]":
    """The pass and the stage that `name{option=value}@stage` names; the stage may be left out."""
    from picompile_passes.stages import Stage

    name, at, stage = text.rpartition("@")
    # An option may hold an @ too.
    if not at or "}" in stage:
        return text, None
    known = {each.text: each for each in Stage}
    if stage not in known:
        raise UsageError(f"--pass {text}: {stage!r} is no stage; the stages are {', '.join(known)}")
    return name, known[stage]


def _in_order(own: "Sequence[Pass]", extra: "Sequence[tuple[Pass, Stage | None]]") -> "list[Pass]":
    """`own` passes, with each of the `extra` ones where its stage, or else the one it requires, is reached."""
    from picompile_passes.stages import Stage

    ordered, reached = [], min(Stage)
    waiting = [(pass_, pass_.requires if stage is None else max(stage, pass_.requires)) for pass_, stage in extra]
    for pass_ in own:
        ordered += [other for other, stage in waiting if stage <= reached]
        waiting = [(other, stage) for other, stage in waiting if stage > reached]
        ordered.append(pass_)
        reached = max(reached, pass_.ensures or reached)
    return [*ordered, *(other for other, _ in waiting)]


def run_passes(captured: "Captured", options: CompileOptions, progress: Progress) -> "GraphModule":
    """Runs the pipeline on a captured graph; the result is of the quantized stage."""
    return _run_passes(pipeline_passes(options), captured, options, progress)


def _run_passes(
    passes: "Sequence[Pass]", captured: "Captured", options: CompileOptions, progress: Progress
) -> "GraphModule":
    from picompile_passes.pipeline import Dump, Pipeline, each, verifying

    # Where there is no folder for dumps; it is made only if something fails.
    fallback = Path(tempfile.gettempdir()) / f"picompile-{os.getpid()}"
    # Dumped before it is verified, so that a faulty graph is there to be looked at.
    dump = Dump(options.dump_ir) if options.dump_ir is not None else None
    with progress.step("passes", len(passes)) as advance:
        hook = each(dump, verifying if options.verify else None, lambda *_: advance(1))
        pipeline = Pipeline(tuple(passes), hook, reproducers=options.dump_ir or fallback)
        return pipeline(captured.graph_module).graph_module


def _kv_dtype(captured: "Captured") -> str:
    """FATReLU jumps at its threshold: what a float16 cache rounds off moves neurons across and changes the logits."""
    return "f32" if captured.facts.activation.startswith("fatrelu") else "f16"


def _lower(graph_module: "GraphModule", source: _Source, options: CompileOptions, progress: Progress) -> "Lowered":
    with progress.step("lower"):
        from picompile.hot_device import placement
        from picompile_codegen.lower import LowerOptions, lower

        kv_dtype = KV_DTYPES[options.kv_dtype or _kv_dtype(source.captured)]
        device = source.device
        lower_options = LowerOptions(
            source.context,
            options.chunk,
            kv_dtype,
            options.sequences,
            None if device is None else device.kind,
            placement(options.plan, source.captured.facts.layers),
        )
        lowered = lower(graph_module, lower_options)
    _say_if_large(lowered.program, progress)
    return lowered


def _say_if_large(program: "Program", progress: Progress) -> None:
    """An artifact may be for a machine that has more memory; on this one it would not load."""
    from picompile.measure import host_memory

    total_bytes, _ = host_memory()
    if program.state_bytes > total_bytes:
        progress.say(
            f"{_cache_text(program.sequences, program.context)} takes {program.state_bytes / 2**30:.1f} GiB, more than "
            f"this machine's {total_bytes / 2**30:.1f} GiB: the artifact will not load here"
        )


def _cache_text(sequences: int, context: int) -> str:
    several = "" if sequences == 1 else f"{sequences} sequences of "
    return f"a cache for {several}{context} tokens"


def _write(compiled: _Compiled, output: Path, options: CompileOptions, progress: Progress) -> None:
    from picompile import artifact_writer as writer
    from picompile.code import build_code, code_to_measure
    from picompile.tokenizer_files import read_tokenizer
    from picompile_passes.materialize import evaluate_constant

    source, lowered, prediction = compiled.source, compiled.lowered, compiled.prediction
    weights = source.captured.weights if prediction is None else prediction.weights(source.captured.weights)
    tokenizer = read_tokenizer(source.folder, source.captured.facts.vocab)
    tensors = list(lowered.weights.tensors.values())
    total = writer.weights_bytes(tensors)
    # The gate reads with the artifact as it will be used; one for another machine gets code for this one meanwhile.
    code = source.code if prediction is None else code_to_measure(source.code)
    writer.check_disk(output, total)
    with writer.replacing(output) as folder:
        build_code(code, lowered, folder, progress)
        hot_device = None if source.device is None else source.device.build(code, lowered, folder, progress)
        with progress.step("weights", total) as advance:
            sha256 = writer.write_weights(
                folder / "weights.safetensors",
                tensors,
                lambda node: evaluate_constant(compiled.graph_module, node, weights),
                advance,
            )
        tokenizer.write(folder)
        writer.write_json(folder / "program.json", lowered.program.to_json())
        _write_facts(compiled, folder, options, code, sha256, None, hot_device)
        if prediction is not None:
            accuracy = prediction.measure(folder, source.captured, source.context, options, progress)
            for each in code[len(source.code) :]:
                (folder / each.file).unlink()
            _write_facts(compiled, folder, options, source.code, sha256, accuracy, hot_device)


def _write_facts(
    compiled: _Compiled,
    folder: Path,
    options: CompileOptions,
    code: "Sequence[Code]",
    sha256: str,
    accuracy: dict[str, Any] | None,
    hot_device: dict[str, Any] | None,
) -> None:
    """Writes report and manifest, with what the gate has found once it has."""
    from picompile import artifact_writer as writer

    writer.write_json(folder / "report.json", _report(compiled.lowered, options.plan, accuracy))
    manifest = _manifest(compiled, folder, options, code, sha256, accuracy, hot_device)
    writer.write_json(folder / "manifest.json", manifest)


def _report(lowered: "Lowered", plan: "Plan | None", accuracy: dict[str, Any] | None) -> dict[str, Any]:
    """What is known of each feed-forward block, of the plan that split them, and what the predictors cost."""
    from picompile_codegen.program import tensor_bytes

    sizes = {name: tensor_bytes(tensor.dtype, tensor.shape) for name, tensor in lowered.weights.tensors.items()}
    report = {"schema": 1, "ffn": [vars(part) for part in lowered.program.ffn], "weight_bytes": sizes}
    if plan is not None:
        report["plan"] = _without_neurons(plan)
    return report if accuracy is None else report | {"accuracy": accuracy}


def _without_neurons(plan: "Plan") -> dict[str, Any]:
    """The plan but for the numbers of the hot neurons, which the artifact has in its tables."""
    content = plan.to_json()
    layers = [{key: value for key, value in layer.items() if key != "hot"} for layer in content["layers"]]
    return content | {"layers": layers}


def _manifest(
    compiled: _Compiled,
    folder: Path,
    options: CompileOptions,
    code: "Sequence[Code]",
    weights_sha256: str,
    accuracy: dict[str, Any] | None,
    hot_device: dict[str, Any] | None,
) -> dict[str, Any]:
    import picompile
    from picompile import artifact_writer as writer
    from picompile.tokenizer_files import generation_eos

    files = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    names = sorted(name for name in files if name != "manifest.json")
    program, facts = compiled.lowered.program, asdict(compiled.source.captured.facts)
    facts["eos_token_ids"] = sorted({*facts["eos_token_ids"], *generation_eos(compiled.source.folder)})
    gate = {} if accuracy is None else {"accuracy": {key: accuracy[key] for key in accuracy if key != "layers"}}
    return {
        "format": writer.MANIFEST_FORMAT,
        "schema": writer.MANIFEST_SCHEMA,
        "picompile": picompile.__version__,
        "abi": writer.KERNEL_ABI,
        "target": ",".join(target.name for target in find_compiled_targets(options.target)),
        "code": [each.to_json() for each in code],
        **({} if hot_device is None else {"hot_device": hot_device}),
        "model": facts,
        "quant": options.quant,
        "predictor": "+".join(sorted({part.predictor for part in program.ffn})),
        # Bytes are what a q8 cache is made of.
        "kv_dtype": {"int8": KV_DTYPES["q8"]}.get(program.state["k.0"].dtype, program.state["k.0"].dtype),
        "context": program.context,
        "chunk": program.chunk,
        "sequences": program.sequences,
        **gate,
        "files": {
            name: writer.file_record(folder / name, weights_sha256 if name == "weights.safetensors" else None)
            for name in names
        },
    }
