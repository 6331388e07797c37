"""What the guarded process and the one that started it agree on."""

TENSORS_FILE, REFUSAL_FILE = "tensors.safetensors", "refusal.txt"

# Exit codes of the process. A full disk has one of its own, since there no refusal can be written either.
REFUSED, DISK_FULL = 1, 5


class RefusedError(Exception):
    """A file that is not taken, and why; raised in the guarded process only."""
