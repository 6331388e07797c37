"""The line about formats and rounding, of reports that are whole and damaged."""

from typing import Any

import pytest

from picompile.cli.weights_show import weights_text


@pytest.mark.parametrize(
    ("formats", "rounding", "text"),
    [
        ({"a": "f16", "b": "f16"}, {"method": "nearest"}, "2 in f16"),
        ({"a": "q4", "b": "q6", "c": "q4"}, {"method": "nearest"}, "2 in q4, 1 in q6; rounded to the nearest"),
        (
            {"a": "q8", "b": "q4"},
            {"method": "calibrated", "tokens": 2048, "bits_per_weight": 5.2, "loss_nats": 0.00123},
            "1 in q8, 1 in q4; 5.200 bits a weight, estimated to lose 0.00123 nats a token; rounded for 2,048 tokens "
            "of calibration text at most",
        ),
        ({"a": "q4"}, None, "1 in q4"),
        ({"a": []}, {"method": "calibrated"}, "1 in []; how they were rounded cannot be read"),
        ({"a": "q4"}, {"bits_per_weight": "x", "loss_nats": 0}, "1 in q4; how they were rounded cannot be read"),
        ({"a": "q4"}, {}, "1 in q4; how they were rounded cannot be read"),
    ],
)
def test_formats_and_rounding_in_a_line(formats: dict[str, Any], rounding: dict[str, Any] | None, text: str) -> None:
    assert weights_text(formats, rounding) == text
