"""Two amounts of memory, told so that one can see which is more."""

from __future__ import annotations


def two_amounts(first_bytes: int, second_bytes: int) -> tuple[str, str]:
    """Both as `0.07 GiB`, with as many digits as it takes to tell them apart, or else in bytes."""
    for digits in (2, 3, 4):
        texts = tuple(f"{size / 2**30:.{digits}f} GiB" for size in (first_bytes, second_bytes))
        if texts[0] != texts[1]:
            return texts[0], texts[1]
    if first_bytes == second_bytes:
        return f"{first_bytes / 2**30:.2f} GiB", f"{second_bytes / 2**30:.2f} GiB"
    return f"{first_bytes:,} bytes", f"{second_bytes:,} bytes"
