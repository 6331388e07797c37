"""The guarded process: `python -m picompile.predictors.powerinfer.child` with a request on standard input.

It reads pickles of strangers, with a library that was not made for that. If it takes too much memory or time, its
limits or the parent end it. It writes tensors to a safetensors file, or the reason of a rejection to a text file; the
parent reads nothing else.
"""

import errno
import json
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from picompile.errors import DoesNotFitError
from picompile.predictors.powerinfer.guard import DISK_FULL, REFUSAL_FILE, REFUSED, TENSORS_FILE
from picompile.predictors.profile.files import write_tensors
from picompile.processes import end_with_parent

# Shares of the tokens, which some write in place of counts, become counts in this many.
SHARE_TOKENS = 1_000_000


class RefusedError(Exception):
    """A file is rejected, and why. Raised only in the guarded process."""


def main() -> int:
    """Read the requested files. Return the exit code: 0, `DISK_FULL`, or `REFUSED` if a reason was written."""
    request = json.load(sys.stdin)
    end_with_parent(request["parent"])
    output = Path(request["output"])
    # Limits do not count the libraries, which were imported before: they are trusted, and large.
    _limit_memory(request["memory_bytes"])
    try:
        tensors = read_files(request["files"]) | read_activations(request["activations"])
        write_tensors(output / TENSORS_FILE, tensors)
    except DoesNotFitError:
        return DISK_FULL
    except Exception as error:
        (output / REFUSAL_FILE).write_text(_explain(error), encoding="utf-8", errors="replace")
        return REFUSED
    return 0


def _limit_memory(memory_bytes: int) -> None:
    """Limit the memory of the process beyond what it has used."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        mapped_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    highest = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = mapped_bytes + memory_bytes
    limit = limit if highest == resource.RLIM_INFINITY else min(limit, highest)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _explain(error: Exception) -> str:
    if isinstance(error, RefusedError):
        return str(error)
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "reading it takes more memory than its size explains"
    return f"cannot be read: {type(error).__name__}: {error}"


def read_files(files: Mapping[str, str]) -> dict[str, Tensor]:
    """Return `layers.N.fc1` and `layers.N.fc2`, float16, from each layer's state dict. Raise `RefusedError`."""
    found = {}
    for layer, file in files.items():
        state, name_of_file = _load(file), os.path.basename(file)
        names = {f"{part}.weight": part for part in ("fc1", "fc2")}
        if not isinstance(state, Mapping) or set(state) != set(names):
            raise RefusedError(f"{name_of_file} holds {_contents(state)}, not fc1.weight and fc2.weight")
        for name, part in names.items():
            values = _tensor(state[name], f"{name} of {name_of_file}", file).half()
            if not bool(values.isfinite().all()):
                raise RefusedError(f"{name} of {name_of_file} holds values that are no numbers, or too large for f16")
            found[f"layers.{layer}.{part}"] = values
    return found


def read_activations(files: Mapping[str, str]) -> dict[str, Tensor]:
    """Return `layers.N.counts`, int64, from each layer's statistics: its numbers, or shares turned into counts.

    Raise `RefusedError` for what is no list of numbers from zero.
    """
    found = {}
    for layer, file in files.items():
        origin = os.path.basename(file)
        tensor = _tensor(_load(file), origin, file)
        if tensor.dim() != 1:
            raise RefusedError(f"{origin} is {list(tensor.shape)}, not one number a neuron")
        values = tensor.double()
        if not bool((torch.isfinite(values) & (values >= 0) & (values <= 1 << 52)).all()):
            raise RefusedError(f"{origin} holds values that are no counts")
        shares = bool((values != values.round()).any()) and bool((values <= 1).all())
        found[f"layers.{layer}.counts"] = (values * SHARE_TOKENS if shares else values).round().long()
    return found


def _load(file: str) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except MemoryError:
        raise
    except Exception as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RefusedError(f"{os.path.basename(file)}: torch.load(weights_only=True) refuses it: {text}") from error


def _tensor(value: object, what: str, file: str) -> Tensor:
    """`value` if it is a plain tensor that lies in `file` as a whole."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_complex():
        raise RefusedError(f"{what} is no tensor of numbers")
    # Strides of zero make a tensor of any size from one number.
    if value.numel() == 0 or value.numel() * value.element_size() > os.path.getsize(file):
        raise RefusedError(f"{what} is {list(value.shape)}, which is not what its file has")
    return value.detach()


def _contents(state: object) -> str:
    return ", ".join(map(str, list(state)[:4])) if isinstance(state, Mapping) else f"a {type(state).__name__}"


if __name__ == "__main__":
    sys.exit(main())
