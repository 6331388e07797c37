"""The runtime of picompile: loads a compiled model and runs it. Needs numpy and tokenizers, and no compiler.

from picompile_runtime import Tokenizer, generate, load

with load("artifact") as engine:
    for piece in generate(engine, Tokenizer.of(engine.artifact), "Once upon a time"):
        print(piece, end="", flush=True)

An artifact that was compiled for several sequences reads a token of each in one step, each in a slot of its own:

with load("artifact") as engine:
    engine.prefill(first_prompt, slot=0)
    engine.prefill(second_prompt, slot=1)
    logits = engine.decode_batch([token, other_token], slots=[0, 1])  # float32 [2, vocab]
"""

from picompile_runtime.artifact.reader import Artifact, Manifest, open_artifact, verify
from picompile_runtime.bench.floor import memory_bandwidth
from picompile_runtime.bench.measure import measure
from picompile_runtime.bench.perplexity import Perplexity, perplexity
from picompile_runtime.engine.engine import Engine, load
from picompile_runtime.engine.timing import FiringCounts
from picompile_runtime.errors import (
    ArtifactError,
    DoesNotFitError,
    KernelError,
    MachineError,
    PicompileRuntimeError,
    RequestError,
)
from picompile_runtime.sampling.generate import Generation, GenerationStats, generate
from picompile_runtime.sampling.sampler import Sampler, SamplingParams
from picompile_runtime.sampling.scores import Scores, TopScores
from picompile_runtime.sampling.tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "Artifact",
    "ArtifactError",
    "DoesNotFitError",
    "Engine",
    "FiringCounts",
    "Generation",
    "GenerationStats",
    "KernelError",
    "MachineError",
    "Manifest",
    "Perplexity",
    "PicompileRuntimeError",
    "RequestError",
    "Sampler",
    "SamplingParams",
    "Scores",
    "StreamDecoder",
    "Tokenizer",
    "TopScores",
    "generate",
    "load",
    "measure",
    "memory_bandwidth",
    "open_artifact",
    "perplexity",
    "verify",
]
