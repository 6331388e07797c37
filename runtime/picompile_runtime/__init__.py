"""The runtime of picompile: it loads a compiled model and runs it. It needs numpy, tokenizers and jinja2, no compiler.

from picompile_runtime import Tokenizer, generate, load

with load("artifact") as engine:
    for piece in generate(engine, Tokenizer.of(engine.artifact), "Once upon a time"):
        print(piece, end="", flush=True)

An artifact that was compiled for several sequences reads one token of each in a single step; each has its own slot:

with load("artifact") as engine:
    engine.prefill(first_prompt, slot=0)
    engine.prefill(second_prompt, slot=1)
    logits = engine.decode_sequences([token, other_token], slots=[0, 1])  # float32 [2, vocab]
"""

import importlib
from typing import TYPE_CHECKING, Any

from picompile_runtime.version import __version__

if TYPE_CHECKING:
    from picompile_runtime.artifact.manifest import Manifest
    from picompile_runtime.artifact.reader import Artifact, open_artifact
    from picompile_runtime.artifact.verify import verify
    from picompile_runtime.bench.bandwidth import memory_bandwidth
    from picompile_runtime.bench.measure import measure
    from picompile_runtime.bench.perplexity import Perplexity, perplexity
    from picompile_runtime.engine.engine import Engine, load
    from picompile_runtime.engine.timing import FiringCounts
    from picompile_runtime.errors import (
        ArtifactError,
        CacheOverflowError,
        DoesNotFitError,
        KernelError,
        MachineError,
        PicompileRuntimeError,
        RequestError,
    )
    from picompile_runtime.sampling.generate import Generation, GenerationStats, generate
    from picompile_runtime.sampling.sampler import Sampler, SamplingParams, Scores, TopScores
    from picompile_runtime.sampling.tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "Artifact",
    "ArtifactError",
    "CacheOverflowError",
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
    "__version__",
    "generate",
    "load",
    "measure",
    "memory_bandwidth",
    "open_artifact",
    "perplexity",
    "verify",
]

# Names are imported on first use (PEP 562): importing the package costs nothing.
_HOME = {
    "Artifact": "picompile_runtime.artifact.reader",
    "ArtifactError": "picompile_runtime.errors",
    "CacheOverflowError": "picompile_runtime.errors",
    "DoesNotFitError": "picompile_runtime.errors",
    "Engine": "picompile_runtime.engine.engine",
    "FiringCounts": "picompile_runtime.engine.timing",
    "Generation": "picompile_runtime.sampling.generate",
    "GenerationStats": "picompile_runtime.sampling.generate",
    "KernelError": "picompile_runtime.errors",
    "MachineError": "picompile_runtime.errors",
    "Manifest": "picompile_runtime.artifact.manifest",
    "Perplexity": "picompile_runtime.bench.perplexity",
    "PicompileRuntimeError": "picompile_runtime.errors",
    "RequestError": "picompile_runtime.errors",
    "Sampler": "picompile_runtime.sampling.sampler",
    "SamplingParams": "picompile_runtime.sampling.sampler",
    "Scores": "picompile_runtime.sampling.sampler",
    "StreamDecoder": "picompile_runtime.sampling.tokenizer",
    "Tokenizer": "picompile_runtime.sampling.tokenizer",
    "TopScores": "picompile_runtime.sampling.sampler",
    "generate": "picompile_runtime.sampling.generate",
    "load": "picompile_runtime.engine.engine",
    "measure": "picompile_runtime.bench.measure",
    "memory_bandwidth": "picompile_runtime.bench.bandwidth",
    "open_artifact": "picompile_runtime.artifact.reader",
    "perplexity": "picompile_runtime.bench.perplexity",
    "verify": "picompile_runtime.artifact.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
