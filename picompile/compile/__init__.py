"""The compiler driver: from a checkpoint to an artifact, in steps that each return a value.

| step | result | where |
| --- | --- | --- |
| start | the artifact itself, where all but its weights is known from another one | `entry`, `structure` |
| capture | `Captured`: the model as an FX graph, without weights | `driver` |
| resolve options | `CompileConfig`: every default filled in | `picompile.config` |
| predictors | `PredictorSet`, None where they are lossless: given, or trained on a profile | `picompile.predictors` |
| limits | `CompileConfig` with the limits below which neurons are left out, where it asks for them | `weights` |
| formats | `CompileConfig` with a format for each matrix, where it has a budget of bits | `weights` |
| rounding | `WeightSource`: the weights, and how they are rounded where that takes text | `weights` |
| plan | `Plan`, None where nothing is placed: which neurons are hot, and where the rest lies | `plan` |
| passes | `GraphModule`: canonical → predicted → partitioned → quantized | `passes` |
| lower | `Lowered`: kernel calls, planned buffers, packed tensors that are not read yet | `lower` |
| write | `WrittenArtifact`: kernels compiled and linked, each tensor read, packed and written | `picompile.artifact` |
| accuracy check | `AccuracyReport`: perplexity with the predictors against every neuron | `accuracy` |
| bfloat16 | `Bf16Accuracy`, where it was measured: what prompts in bfloat16 cost | `bf16` |
| comparison | `CheckpointComparison`, where asked for: what each part costs against the checkpoint | `comparison` |

The last column names modules of this folder, or packages.

An artifact that meets its accuracy bound is published: its folder is renamed into place. Else the steps from the plan
on are taken again with larger predictors for the layers that lose most, if there are any.
"""

import importlib
from typing import TYPE_CHECKING, Any

from picompile.compile.entry import compile_model
from picompile.config import CompileOptions

if TYPE_CHECKING:
    from picompile.compile.passes import pipeline_passes, run_passes

__all__ = ["CompileOptions", "compile_model", "pipeline_passes", "run_passes"]


def __getattr__(name: str) -> Any:
    # These import torch.
    if name not in ("pipeline_passes", "run_passes"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("picompile.compile.passes"), name)
