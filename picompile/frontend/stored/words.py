"""Small integers in int32 words: as one stream of bits, lowest first, which 3-bit integers cross from word to word."""

import torch
from torch import Tensor

WORD_BITS = 32
# So many integers fill whole words, whatever their bits.
WHOLE = 32


def words_of(count: int, bits: int) -> int:
    """Return the number of int32 that hold `count` integers."""
    return -(-count * bits // WORD_BITS)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` integers of `bits` bits in each column of int32 [n, columns], int16 [count, columns].

    Integer i of a column has the bits i × bits to (i + 1) × bits - 1 of its words one after the other.
    """
    columns = words.shape[1]
    if WORD_BITS % bits == 0:
        fields = torch.arange(0, WORD_BITS, bits, dtype=torch.int32).view(1, -1, 1)
        integers = torch.bitwise_right_shift(words.unsqueeze(1), fields).bitwise_and_((1 << bits) - 1)
        return integers.to(torch.int16).reshape(-1, columns)[:count]
    starts = torch.arange(count) * bits
    low = starts // WORD_BITS
    unsigned = words.to(torch.int64).bitwise_and_((1 << WORD_BITS) - 1)
    high = (low + 1).clamp_(max=len(words) - 1)
    pairs = unsigned[low] | (unsigned[high] << WORD_BITS)
    integers = (pairs >> (starts % WORD_BITS).unsqueeze(1)).bitwise_and_((1 << bits) - 1)
    return integers.to(torch.int16)
