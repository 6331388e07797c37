"""Tools to test passes: random models of every stage, weights, and the properties of a pass.

Needs hypothesis: `pip install hypothesis`. The parts, by the question they answer:

| | |
| --- | --- |
| does this pass keep its promises? | `check_pass`, which checks `PROPERTIES` |
| do these two graphs compute the same? | `assert_equivalent`, within `TOLERANCES` or a bound |
| which graphs are there? | `graphs`, `shapes` and `build`, `captured_decoders` |
| what else varies? | `pipelines`, `skipping_predictors`, `hot_sets`, `partitions`, `masks`, `targets` |
| what does a graph compute? | `random_weights`, `run`, `every_neuron` |
| was a graph changed? | `structure` |
"""

import importlib.util

from picompile_passes.extras import install_extra

if importlib.util.find_spec("hypothesis") is None:
    raise ImportError(f"picompile.testing needs hypothesis: {install_extra('testing')}")

from picompile.testing.captured.decoder import build_captured, captured_decoders, captured_styles
from picompile.testing.captured.style import CapturedStyle
from picompile.testing.checking import PropertyError, check_pass, check_run
from picompile.testing.equivalence import TOLERANCES, assert_equivalent, run, structure
from picompile.testing.properties import PROPERTIES
from picompile.testing.shapes import LLAMA, OPT, GraphShape, build, shapes
from picompile.testing.strategies import graphs, hot_sets, masks, partitions, pipelines, targets
from picompile.testing.weights import (
    SKIPPING_KINDS,
    TESTING_KINDS,
    RandomWeights,
    every_neuron,
    random_weights,
    skipping_predictors,
    with_predictors,
)

__all__ = [
    "LLAMA",
    "OPT",
    "PROPERTIES",
    "SKIPPING_KINDS",
    "TESTING_KINDS",
    "TOLERANCES",
    "CapturedStyle",
    "GraphShape",
    "PropertyError",
    "RandomWeights",
    "assert_equivalent",
    "build",
    "build_captured",
    "captured_decoders",
    "captured_styles",
    "check_pass",
    "check_run",
    "every_neuron",
    "graphs",
    "hot_sets",
    "masks",
    "partitions",
    "pipelines",
    "random_weights",
    "run",
    "shapes",
    "skipping_predictors",
    "structure",
    "targets",
    "with_predictors",
]
