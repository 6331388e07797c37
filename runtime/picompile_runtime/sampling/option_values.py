"""The options of a command line that choose tokens, and the sampling parameters that follow for one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from picompile_runtime.artifact.reader import Artifact
from picompile_runtime.run_options import SAMPLING, RunOption
from picompile_runtime.sampling.model_defaults import artifact_defaults
from picompile_runtime.sampling.sampler import SamplingParams


@dataclass(frozen=True)
class OptionValues:
    """The options of a command line that choose tokens.

    Attributes:
        given: the values that the user gave, and those of options that do not depend on the model, by name.
        fallback: the values where neither the user nor the model says.
    """

    given: Mapping[str, Any]
    fallback: SamplingParams

    @classmethod
    def of(cls, options: Mapping[str, RunOption], values: Mapping[str, Any]) -> OptionValues:
        """Return the values of a command's `options`, by key. Raises RequestError for one that makes no sense."""
        fallbacks: dict[str, Any] = {name: options[name].default for name in SAMPLING}
        fallback = SamplingParams(**fallbacks)
        # An option that the model has no say in counts whether it is given or not.
        given = {name: values[name] for name in SAMPLING if not options[name].of_model or values[name] is not None}
        replace(fallback, **given)  # checked before a model is loaded
        return cls(given, fallback)

    def params(self, artifact: Artifact) -> SamplingParams:
        """Return how to choose tokens: as the user says, else as the model's generation_config.json does.

        Raises ArtifactError if that makes no sense.
        """
        return replace(artifact_defaults(artifact, self.fallback), **self.given)
