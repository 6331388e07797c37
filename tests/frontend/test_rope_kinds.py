"""Every kind of rotary scaling, with heads that turn wholly and in part, as eager transformers computes them."""

from pathlib import Path
from typing import Any

import pytest

from helpers.greedy import first_difference, graph_error
from helpers.small_models import small_config, small_model
from picompile import CompileOptions, compile_model

# More than the shorter of the lengths that models were trained on, 32.
_COUNTS = (3, 50)
_ORIGINAL = {"original_max_position_embeddings": 32}
_YARN = {"rope_type": "yarn", "factor": 4.0, **_ORIGINAL}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_ORIGINAL}


def _longrope(pairs: int, **more: Any) -> dict[str, Any]:
    factors = {"short_factor": [1 + pair / 8 for pair in range(pairs)], "long_factor": [2.0] * pairs}
    return {"rope_type": "longrope", "original_max_position_embeddings": 64, **factors, **more}


def _kinds(pairs: int) -> dict[str, dict[str, Any]]:
    return {
        "linear": {"rope_type": "linear", "factor": 4.0},
        "dynamic": {"rope_type": "dynamic", "factor": 4.0},
        "yarn": _YARN,
        "yarn factor": {**_YARN, "attention_factor": 1.3},
        "yarn mscale": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
        "yarn ends": {**_YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
        "longrope": _longrope(pairs),
        "longrope factor": _longrope(pairs, attention_factor=1.25),
        "llama3": _LLAMA3,
    }


# Classes with a half of each head turned, and with all of it. Heads have 16 elements.
_PARTLY = ("phi3", "glm4", "stablelm", "gpt_neox", "olmo3", "nemotron", "persimmon")
_WHOLLY = ("llama", "qwen2", "olmo3", "gpt_neox")
# transformers' class takes no other for it.
_LONGROPE_ALONE = ("phi3",)
_CASES = [
    (model_type, share, kind)
    for share, types in ((0.5, _PARTLY), (1.0, _WHOLLY))
    for model_type in types
    for kind in _kinds(0)
    if model_type not in _LONGROPE_ALONE or kind.startswith("longrope")
]


def _options(share: float, kind: str) -> dict[str, Any]:
    rope = {"rope_theta": 10000.0, "partial_rotary_factor": share, **_kinds(int(8 * share))[kind]}
    return {"rope_parameters": rope, "partial_rotary_factor": share}


@pytest.mark.slow("exports a model per class and kind; Phi-4-mini's is fast", but=("phi3-0.5-longrope]",))
@pytest.mark.parametrize(("model_type", "share", "kind"), _CASES)
def test_scaling_of_whole_and_of_partly_turned_heads(model_type: str, share: float, kind: str) -> None:
    assert graph_error(model_type, _options(share, kind), _COUNTS) < 1e-5


@pytest.mark.slow("compiles and runs a model per case")
@pytest.mark.parametrize(("model_type", "kind"), [("phi3", "longrope"), ("stablelm", "yarn"), ("glm4", "yarn mscale")])
def test_artifacts_of_partly_turned_heads(model_type: str, kind: str, tmp_path: Path) -> None:
    """One token is turned inside the attention, several are turned before it."""
    model = small_model(small_config(model_type, **_options(0.5, kind)))
    model.half().save_pretrained(tmp_path / "model")
    model.float()
    compile_model(tmp_path / "model", tmp_path / "artifact", CompileOptions(quant="f16", context=60))
    assert first_difference(model, tmp_path / "artifact") is None
