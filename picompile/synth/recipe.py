"""The recipe of a synthesized checkpoint: the request, its random numbers, and the writers of its tensors."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from picompile.synth.shapes import ModelShape
from picompile.synth.writer import CheckpointWriter

# The constant direction's entries in the stream, beside entries of about 1. More of it makes offsets small; less leaves
# room for everything else.
CONSTANT = 0.5


@dataclass(frozen=True)
class Recipe:
    """One synthesis.

    `rates` float64 [ffn] are the firing rates of a layer's neurons, ascending; `rank` is the predictors'. `direction`
    float32 [hidden] is the constant direction: entries ±1, as many of each. Every matrix that reads the stream ignores
    it and every matrix that writes to the stream leaves it alone, but for the gates' offsets. `signs` float32 [hidden]
    are those of the final norm. `subspace` float32 [r, hidden] are orthonormal rows, orthogonal to the constant
    direction: all that decides which neurons fire. Embeddings are of one length in it, so that every token fires about
    as many.
    """

    shape: ModelShape
    seed: int
    rank: int
    rates: Tensor
    direction: Tensor
    signs: Tensor
    subspace: Tensor
    weights: CheckpointWriter
    predictors: CheckpointWriter

    @property
    def offset(self) -> str:
        """What makes the offset of a neuron's gate.

        `bias`: the gate has one. `norm`: the bias of the layer norm before the FFN carries the constant direction.
        `stream`: the embedding carries it, and it stays in the residual stream.
        """
        if self.shape.ffn_bias:
            return "bias"
        return "norm" if self.shape.family.norm == "layer" else "stream"

    def name(self, role: str, layer: int) -> str:
        """The checkpoint's name of a layer's role, without `.weight` or `.bias`."""
        return self.shape.family.names[role].format(layer)

    def generator(self, name: str) -> torch.Generator:
        """Return the generator of `name`; it depends on the seed, but not on what was made before."""
        return generator(self.seed, name)

    def uniform(self, name: str, rows: int, columns: int, scale: float) -> Tensor:
        """A matrix [rows, columns] whose entries have the deviation scale / sqrt(columns).

        Uniform, since a normal distribution takes five times as long to draw and products with it look the same.
        """
        bound = scale * (3 / columns) ** 0.5
        return torch.empty(rows, columns).uniform_(-bound, bound, generator=self.generator(name))

    def orthonormal(self, name: str, rows: Tensor) -> Tensor:
        """Random orthonormal combinations of orthonormal `rows` [r, columns], of the same shape."""
        rotation: Tensor = torch.linalg.qr(torch.randn(len(rows), len(rows), generator=self.generator(name))).Q
        return rotation @ rows

    def ignore_direction(self, matrix: Tensor) -> Tensor:
        """Make the rows of a matrix [rows, hidden] orthogonal to the constant direction, in place."""
        return matrix.addr_(matrix @ self.direction, self.direction, alpha=-1 / self.shape.hidden)

    def leave_direction(self, matrix: Tensor) -> Tensor:
        """Make the columns of a matrix [hidden, columns] orthogonal to the constant direction, in place."""
        return matrix.addr_(self.direction, self.direction @ matrix, alpha=-1 / self.shape.hidden)


def generator(seed: int, name: str) -> torch.Generator:
    """Return a generator for one tensor."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def balanced_signs(seed: int, name: str, count: int) -> Tensor:
    """Return float32 [count] of ±1, half of them negative."""
    signs = torch.ones(count)
    signs[torch.randperm(count, generator=generator(seed, name))[: count // 2]] = -1
    return signs


def random_subspace(seed: int, rows: int, avoided: Tensor) -> Tensor:
    """float32 [rows, hidden]: random orthonormal rows, orthogonal to those of `avoided` [any, hidden]."""
    drawn = torch.randn(rows, avoided.shape[1], generator=generator(seed, "subspace"))
    unit: Tensor = torch.linalg.qr(avoided.T).Q.T
    subspace: Tensor = torch.linalg.qr((drawn - (drawn @ unit.T) @ unit).T).Q.T
    return subspace.contiguous()
