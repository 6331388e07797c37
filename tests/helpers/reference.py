"""The reference that compiled models are held against: eager transformers on the same rounded weights."""

import torch
from torch import Tensor, nn

from picompile_passes.dialect import dequantize_rows, quantize_rows
from picompile_passes.formats import FORMATS

# These hold a neuron in each column. Where neurons are read one by one, an artifact stores each in a row: groups of 32
# run the other way.
_DOWN = ("down_proj", "fc2", "dense_4h_to_h")


def rounded(weight: Tensor, format_name: str) -> Tensor:
    """Return a matrix [rows, columns] after it was quantized to a weight format and back."""
    return dequantize_rows(quantize_rows(weight, format_name), format_name, weight.shape[1])


@torch.no_grad()
def round_weights(model: nn.Module, format_name: str, by_outputs: bool = False) -> None:
    """Replaces every matrix of a transformers model, in place, by what the format leaves of it. Vectors stay.

    With a format of four bits the head and embeddings are in q6. Down projections are rounded neuron by neuron, or
    `by_outputs`, as on a CPU where every neuron is computed and all sizes are multiples of 16.
    """
    seen: set[int] = set()
    get_head = getattr(model, "get_output_embeddings", lambda: None)
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.ndim != 2 or id(weight) in seen:
            continue
        seen.add(id(weight))
        if isinstance(module, nn.Embedding) or module is get_head():
            weight.copy_(rounded(weight, "q6" if FORMATS[format_name].data_bits == 4 else format_name))
        elif name.endswith(_DOWN) and not by_outputs:
            weight.copy_(rounded(weight.T, format_name).T)
        else:
            weight.copy_(rounded(weight, format_name))


@torch.no_grad()
def eager_logits(model: nn.Module, ids: list[int]) -> Tensor:
    """Logits [tokens, vocabulary] of the whole sequence, float32."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].to(torch.float32)


def relative_error(measured: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected logit."""
    return float((measured - expected).abs().max() / expected.abs().max())
