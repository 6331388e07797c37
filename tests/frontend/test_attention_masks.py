"""Windows as transformers' mask functions show them, and its packed sequences."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)

from picompile.frontend.attention import one_sequence, window_of


def _chunked(size: int) -> Callable[..., Any]:
    return chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64))


def _all_but_one(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Causal but for one pair of tokens, far beyond the square that is compared whole."""
    return (key <= query) & ((key != 100) | (query < 200_000))


@pytest.mark.parametrize(
    ("function", "window"),
    [
        (causal_mask_function, 0),
        (sliding_window_causal_mask_function(1), 1),
        (sliding_window_causal_mask_function(7), 7),
        (sliding_window_causal_mask_function(4096), 4096),
        (sliding_window_causal_mask_function(131_072), 131_072),
        (and_masks(causal_mask_function, sliding_window_causal_mask_function(33)), 33),
        (bidirectional_mask_function, None),
        (_chunked(8), None),
        (_chunked(8192), None),
        (packed_sequence_mask_function(torch.zeros(1, 1 << 18, dtype=torch.int64)), None),
        (lambda *_: torch.tensor(True), None),
        (lambda *_: torch.tensor(False), None),
        (lambda batch, head, query, key: key < query, None),
        (lambda batch, head, query, key: (key <= query) & ((key > query - 9) | (key < 4)), None),
        (lambda batch, head, query, key: (key <= query) & (key > query - 9 * (head + 1)), 9),
        (_all_but_one, None),
        (lambda *_: 1 / 0, None),
    ],
)
def test_windows(function: Callable[..., Any], window: int | None) -> None:
    assert window_of(function) == window


def test_positions_are_no_ends_of_sequences() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    with one_sequence():
        assert masking_utils.find_packed_sequence_indices(positions) is None
    assert masking_utils.find_packed_sequence_indices(positions).tolist() == [[0, 0, 1, 1, 1]]
    with pytest.raises(RuntimeError), one_sequence():
        raise RuntimeError
    assert masking_utils.find_packed_sequence_indices(positions) is not None
