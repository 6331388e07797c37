"""The letters that byte-level vocabularies write bytes as, from GPT-2's encoder (`bytes_to_unicode`)."""

from functools import cache


@cache
def byte_letters() -> dict[int, str]:
    """Return the letter of each byte: itself where it prints in Latin-1, and else one from U+0100 on, in order."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in prints]
    return {byte: chr(byte) for byte in prints} | {byte: chr(256 + place) for place, byte in enumerate(others)}


@cache
def letter_bytes() -> dict[str, int]:
    """Return the byte of each letter."""
    return {letter: byte for byte, letter in byte_letters().items()}


def as_letters(text: str) -> str:
    """Return the letters of the bytes of a text in UTF-8."""
    letters = byte_letters()
    return "".join(letters[byte] for byte in text.encode())
