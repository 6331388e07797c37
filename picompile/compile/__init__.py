"""The compiler driver: from a checkpoint to an artifact, in steps that each return a value.

| step | result | where |
| --- | --- | --- |
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

from picompile.compile.driver import compile_model
from picompile.compile.passes import pipeline_passes, run_passes
from picompile.config import CompileOptions

__all__ = ["CompileOptions", "compile_model", "pipeline_passes", "run_passes"]
