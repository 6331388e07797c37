"""The example of every case of a pack, by the name of its kernel's builder."""

from collections.abc import Callable, Mapping
from typing import Any

import _gpu_examples_attention as attention
import _gpu_examples_matrix as matrix
import _gpu_examples_small as small
import numpy as np
from _gpu_example import Example, Maker

_MAKERS: Mapping[str, Callable[[Maker], Example]] = {
    "linear": matrix.linear,
    "ffn": matrix.ffn,
    "embedding": matrix.embedding,
    "predict_low_rank": matrix.low_rank,
    "predict_signs": matrix.signs,
    "attention": attention.attention,
    "cache_write": attention.cache_write,
    "rotary": attention.rotary,
    "rms_norm": small.rms_norm,
    "layer_norm": small.layer_norm,
    "add": small.add,
    "take_last": small.take_last,
    "leading_logits": small.leading_logits,
    "send": small.send,
    "send_mask": small.send_mask,
    "receive": small.receive,
    "receive_mask": small.receive_mask,
    "copy_words": small.copy_words,
}


def example(op: str, parameters: Mapping[str, Any], seed: int, device: str, share: float = 1.0) -> Example:
    """The example of a case, `share` of whose neurons fire. `device` is PyTorch's."""
    return _MAKERS[op](Maker(parameters, np.random.default_rng(seed), device, share))
