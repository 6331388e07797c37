"""What the guarded process and the one that started it agree on."""

TENSORS_FILE, REFUSAL_FILE = "tensors.safetensors", "refusal.json"


class RefusedError(Exception):
    """A file that is not taken, and why; raised in the guarded process only."""
