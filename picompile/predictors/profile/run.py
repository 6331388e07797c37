"""Profiling: from a checkpoint and texts to a profile, layer by layer.

1. tokens      texts become windows of tokens; a small model generates some more
2. thresholds  SiLU and GELU models only: the magnitude or contribution below which a neuron counts as silent
3. layers      all windows go through one layer, whose firings are counted, before the next is read
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.hf import load_model
from picompile.frontend.model_file import read_config
from picompile.output import OutputPath, discard, link_tree, reserve
from picompile.output.place import require_folder_or_nothing
from picompile.predictors.firing import FiringRule
from picompile.predictors.profile.collect import (
    Extra,
    LayerCollector,
    Replace,
    SegmentedModel,
    draw_positions,
    has_threshold,
    layer_of,
    norm_of,
    run_pass,
    summarize,
    summarize_experts,
)
from picompile.predictors.profile.directory import BEGUN_FOLDER, ProfileDirectory, belongs_to_profile
from picompile.predictors.profile.files import read_tensors, write_tensors
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.profile.prepare import ProfileTask, check_profile_output, own_windows, prepare
from picompile.predictors.profile.profile import (
    TOKENS_FILE,
    LayerProfile,
    Profile,
    describe,
    is_complete,
    layer_file,
    load_profile,
    read_description,
)
from picompile.predictors.profile.thresholds import ThresholdSearch
from picompile.predictors.profile.windows import TextWindows
from picompile.products import fast_products, products_in_bf16, require_bf16
from picompile.progress import NoProgress, Progress
from picompile.streaming import Segment, split_layers
from picompile_passes.graph.operands import expert_count
from picompile_passes.passes.canonicalize import canonicalize
from picompile_runtime.version import __version__


@fast_products()
def profile_model(
    model: Path, output: Path, options: ProfileOptions | None = None, progress: Progress | None = None
) -> Profile:
    """Profile the checkpoint `model` into the folder `output`, and return the profile.

    If `output` holds a complete profile of the same inputs, that one is read. An unfinished one is resumed, and ends
    with the same bytes as if it had been made in one go (on the same machine, with as many threads). A profile of other
    inputs is replaced; a complete one only with `options.overwrite`.

    Raises:
        UsageError: A text cannot be used, `output` must not be overwritten, or the processor has no bfloat16.
        UnsupportedModelError: The model cannot be profiled.
        DoesNotFitError: The disk is too small.

    They are raised before anything is written.
    """
    options, progress = options or ProfileOptions(), progress or NoProgress()
    require_folder_or_nothing(output)
    if options.bf16:
        require_bf16()
    if is_complete(output) and not options.overwrite:
        task = prepare(model, options, progress)
        check_profile_output(output, task)
        progress.say(f"{output}: is complete already")
        _tidy(output)
        return load_profile(output)
    # Resolved, so that a link stays a link to the new folder.
    with reserve(output.resolve(), overwrite=True, parents=True) as reserved:
        task = prepare(model, options, progress)
        check_profile_output(output, task)
        _profile(task, output, replace(reserved, check=lambda: check_profile_output(output, task)), progress)
    return load_profile(output)


def _tidy(output: Path) -> None:
    """Remove what an interrupted run left in a complete profile, unless that run is still at work."""
    with suppress(UsageError), reserve(output.resolve(), overwrite=True, wait_s=0):
        ProfileDirectory(output, "").tidy()
        discard(output / BEGUN_FOLDER)


def _profile(task: ProfileTask, output: Path, reserved: OutputPath, progress: Progress) -> None:
    with progress.step("capture"):
        captured = capture(task.model, task.options.activation)
        config = read_config(task.model, task.options.activation)
    # A complete profile stays until the new one replaces it.
    complete, anything = is_complete(output), read_description(output) is not None
    directory = ProfileDirectory(output / BEGUN_FOLDER if complete else output, task.inputs)
    directory.folder.mkdir(exist_ok=True)
    if directory.open():
        progress.say(f"{output}: was begun, and goes on")
    elif anything and not complete:
        progress.say(f"{output}: was begun with other inputs, and begins anew")
    try:
        _ProfileRun(task, model=captured, config=config, directory=directory, progress=progress).run()
    except UnsupportedModelError:
        # A later run would fail in the same way.
        directory.discard()
        raise
    if complete:
        with reserved.folder() as folder:
            link_tree(output, folder, lambda path: path.parts[:1] == (BEGUN_FOLDER,) or belongs_to_profile(path))
            link_tree(directory.folder, folder)


def capture(folder: Path, activation: str | None = None) -> SegmentedModel:
    """Return the canonical graph of a checkpoint, cut into segments, and its weights.

    `activation` is what `load_model` takes; raises as it does.
    """
    captured = load_model(folder, activation)
    graph_module = canonicalize(captured.graph_module)
    segments = split_layers(graph_module)
    if not any(segment.blocks for segment in segments):
        raise UnsupportedModelError(f"{folder}: the model has no feed-forward block to profile")
    return SegmentedModel(graph_module, segments, captured.weights)


@dataclass(frozen=True)
class _ProfileRun:
    task: ProfileTask
    model: SegmentedModel
    config: Mapping[str, Any]
    directory: ProfileDirectory
    progress: Progress

    def run(self) -> None:
        tokens = self._tokens()
        with products_in_bf16(self.task.options.bf16):
            rules, search = self._rules(tokens)
            self._layers(tokens, rules)
        self._finish(tokens, rules, search)

    def _tokens(self) -> TextWindows:
        """Return the windows. They are written to disk first, so that a resumed run has the same ones."""
        text, path = self.task.text, self.directory.folder / TOKENS_FILE
        if not path.is_file():
            own = self._own_windows()
            kept = text.calibration[: len(text.calibration) - len(own)]
            windows = {"calibration": torch.cat([kept, own]), "held_out": text.held_out}
            write_tensors(path, windows, {"own": str(own.numel())})
        windows, metadata = read_tensors(path)
        own_source = (f"{metadata['own']} tokens of the model's own",) if metadata["own"] != "0" else ()
        calibration, held_out = windows["calibration"], windows["held_out"]
        return replace(text, calibration=calibration, held_out=held_out, sources=(*text.sources, *own_source))

    def _own_windows(self) -> Tensor:
        text, facts, count = self.task.text, self.task.facts, self.task.own_tokens
        nothing = text.calibration[:0]
        if count == 0:
            return nothing
        starts = [row[:8].tolist() for row in text.calibration]
        if facts.bos_token_id is not None:
            starts = [[facts.bos_token_id]]
        window = text.calibration.shape[1]
        try:
            options = self.task.options
            return own_windows(self.task.model, count, window, starts, options.seed, self.progress, options.activation)
        except Exception as error:
            # An error with an exit code says what this machine or model cannot do; any other is a bug of picompile.
            if not hasattr(error, "exit_code"):
                raise
            self.progress.say(f"without text of the model's own: {error}")
            return nothing

    def _rules(self, tokens: TextWindows) -> tuple[dict[int, FiringRule], dict[str, Any] | None]:
        blocks = [block for segment in self.model.segments for block in segment.blocks]
        by, bound = self.task.options.by, self.task.options.accuracy_bound
        if bound is None or not any(map(has_threshold, blocks)):
            return {}, None
        return ThresholdSearch(
            self.model,
            windows=tokens.held_out.tolist(),
            by=by,
            accuracy_bound=bound,
            directory=self.directory,
            progress=self.progress,
        ).run()

    def _layers(self, tokens: TextWindows, rules: Mapping[int, FiringRule]) -> None:
        options = self.task.options
        positions = draw_positions(options.samples, tokens.calibration.numel(), options.seed)

        def begin(segment: Segment, extra: Extra) -> tuple[Replace, Callable[[], None]]:
            found = [
                LayerCollector(segment, block, rules.get(layer_of(block), FiringRule()), positions)
                for block in segment.blocks
            ]
            replace = {node: call for collector in found for node, call in collector.replace().items()}
            return replace, lambda: self._write(found)

        last = max(number for number, segment in enumerate(self.model.segments) if segment.blocks)
        windows = tokens.calibration.tolist()
        run_pass(
            self.model,
            name="layers",
            windows=windows,
            begin=begin,
            directory=self.directory,
            progress=self.progress,
            segments=last + 1,
        )

    def _write(self, found: Sequence[LayerCollector]) -> None:
        for collector in found:
            write_tensors(self.directory.folder / layer_file(layer_of(collector.block)), collector.tensors())

    def _finish(self, tokens: TextWindows, rules: Mapping[int, FiringRule], search: Mapping[str, Any] | None) -> None:
        layers = tuple(
            self._summary(block, rules, "block" if norm_of(segment, block) is None else "stream", tokens)
            for segment in self.model.segments
            for block in segment.blocks
        )
        profile = Profile(
            folder=self.directory.folder,
            fingerprint=self.task.fingerprint,
            model_name=self.task.facts.name,
            hidden=self.task.facts.hidden,
            layers=layers,
            window=tokens.calibration.shape[1],
            tokens=tokens.calibration.numel(),
            sample_count=min(self.task.options.samples, tokens.calibration.numel()),
            sources=tokens.sources,
            held_out_source=tokens.held_out_source,
            held_out_tokens=tokens.held_out.numel(),
            thresholds=search,
            config=self.config,
        )
        self.directory.finish(describe(profile, self.task.inputs, __version__, tokens.sha256))

    def _summary(self, block: Node, rules: Mapping[int, FiringRule], place: str, windows: TextWindows) -> LayerProfile:
        layer = layer_of(block)
        path, tokens = self.directory.folder / layer_file(layer), windows.calibration.numel()
        counts = read_tensors(path, only="counts")[0]["counts"]
        figures = summarize(counts, tokens)
        if expert_count(block):
            chosen, after = (read_tensors(path, only=name)[0][name] for name in ("chosen", "after"))
            figures |= summarize_experts(chosen, after, tokens)
        threshold = rules.get(layer, FiringRule()).threshold
        return LayerProfile(layer, len(counts), threshold, place=place, **figures)
