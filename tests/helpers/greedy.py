"""Comparing a compiled model with the eager one that it was made from: greedy tokens, and logits of its graph."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helpers.small_models import causal_types, small_config, small_model
from picompile.frontend.build import call_model
from picompile.frontend.experts import keep_router_biases
from picompile.frontend.export import first_names
from picompile.frontend.hf import capture_config
from picompile.frontend.weight_sources import ModuleWeights
from picompile_passes.graph.materialize import materialize
from picompile_passes.passes.canonicalize import canonicalize

PROMPTS = ([5], [7, 11, 13, 17, 19, 23, 29], list(range(40, 75)))
STEPS = 20
# Of a standard deviation of the logits: float16 keys and values move them by less than a tenth of it.
_NEAR_TIE = 0.02


def first_difference(model: nn.Module, artifact: Path, prompts: Any = PROMPTS, steps: int = STEPS) -> str | None:
    """Return where a greedy token of an artifact is not that of the eager `model`, near-ties aside; None where none.

    Each prompt is continued by `steps` tokens.
    """
    import picompile_runtime

    with picompile_runtime.load(artifact, threads=1) as engine:
        for prompt in prompts:
            ids = list(prompt)
            engine.reset()
            logits = engine.prefill(ids)
            for step in range(steps):
                with torch.no_grad():
                    expected = call_model(model, torch.tensor([ids]), torch.arange(len(ids)).unsqueeze(0))[0, -1]
                found, best = int(logits.argmax()), int(expected.argmax())
                if float(expected[best] - expected[found]) > _NEAR_TIE * float(expected.std()):
                    return f"token {step} behind a prompt of {len(prompt)} is {found}, eager's {best}"
                ids.append(best)
                logits = engine.decode(best)
    return None


def config_json(model_type: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of the config.json of a small model with `options`."""
    config = small_config(model_type, **options).to_dict()
    return {**config, **options, "architectures": [causal_types()[model_type]]}


def graph_error(model_type: str, options: Mapping[str, Any], counts: tuple[int, ...]) -> float:
    """Return the largest difference of the canonical graph's logits from eager PyTorch's, for texts of `counts` tokens.

    It is given as a share of the largest logit.
    """
    model = small_model(small_config(model_type, **options))
    keep_router_biases(model)
    weights = ModuleWeights({name: model.get_parameter(name) for name in first_names(model)})
    graph = materialize(canonicalize(capture_config(config_json(model_type, options))), weights)
    worst = 0.0
    for count in counts:
        ids = torch.randint(200, (count,), generator=torch.Generator().manual_seed(count))
        with torch.no_grad():
            expected = call_model(model, ids.unsqueeze(0), torch.arange(count).unsqueeze(0))[0]
            found = graph(ids, torch.arange(count))
        worst = max(worst, float((found - expected).abs().max()) / max(1.0, float(expected.abs().max())))
    return worst
