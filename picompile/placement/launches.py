"""Count the launches of a decoded token on a GPU, by layer and part.

What a GPU computes in one launch where the CPU takes several calls is decided in `picompile_codegen.lowering.fusion`,
on the graph. Here the same is counted on the calls of a token, since a plan of a shape has no graph. All parts are
taken to be on the accelerator; `times.transfer_launches` has what comes from having them on both sides.
`tests/placement/test_launches.py` compares the sums with lowered programs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from picompile.placement.model_bytes import LayerLaunches

# The part of a layer that a call belongs to, as in `Placement` of `picompile_codegen`.
_PARTS = {
    "norm": "attention",
    "ffn_norm": "attention",
    "linear": "attention",
    "add": "attention",
    "elementwise": "attention",
    "rotary": "kv_cache",
    "attention": "kv_cache",
    "predict": "predictor",
    "ffn": "hot",
}
# These are the limits of `picompile_codegen.lowering.fusion`, which imports torch.
_MOST_TERMS, _ALIGNED_OUTPUTS = 4, 16


@dataclass(frozen=True)
class TalliedCall:
    """One call of a decoded token.

    Attributes:
        op: its operator.
        tensors: the packed weights and caches that it reads, by the kernel's parameter.
        launches: those of its kernel for an accelerator, if it is a call of its own there.
        reads: the values that it reads, by any names that tell them apart.
        makes: the value that it makes.
        width: elements of that value, a token.
    """

    op: str
    tensors: Mapping[str, str]
    launches: int
    reads: tuple[str, ...]
    makes: str
    width: int


def count_launches(
    calls: Sequence[TalliedCall], weight_bytes: Mapping[str, int], sequences: int
) -> tuple[tuple[LayerLaunches, ...], int]:
    """Return the launches of each layer, and those of the output head without the search for the top logits.

    A norm at the beginning of a layer is computed with the last addition of the layer before. Four things are left out:
    that it is a launch of its own in the first layer, and in one behind a layer of the host; the two more transfers for
    OPT-350M's projection of embeddings; the further inputs of a step of several sequences; and that the hot part of
    such a step, if no mask is made, may add up fewer slices than the whole block.

    Args:
        calls: the calls of a decoded token.
        weight_bytes: bytes of the tensors that they read, by name.
        sequences: how many sequences are decoded together.
    """
    ends, found = layer_ends(calls), _Fusion(calls, weight_bytes, sequences).launches()
    counts = [Counter[str]() for _ in range(len(ends) + 1)]
    for place, call in enumerate(calls):
        layer = sum(place > end for end in ends)
        counts[layer]["head" if layer == len(ends) else _PARTS.get(call.op, "apart")] += found[place]
    layers = tuple(
        LayerLaunches(
            count["attention"], count["kv_cache"], count["predictor"], count["hot"], _receives_alone(calls, end)
        )
        for count, end in zip(counts[:-1], ends, strict=True)
    )
    return layers, counts[-1]["head"]


def layer_ends(calls: Sequence[TalliedCall]) -> list[int]:
    """Return the place of the last call of each layer: its block or attention, with its norm and the additions behind
    it."""
    ends = [place for place, call in enumerate(calls) if call.op == "ffn"]
    ends[-1] = max(place for place, call in enumerate(calls) if call.op in ("ffn", "attention"))
    for number, end in enumerate(ends):
        while end + 1 < len(calls) and calls[end + 1].op in ("add", "ffn_norm"):
            end += 1
        ends[number] = end
    return ends


def _receives_alone(calls: Sequence[TalliedCall], end: int) -> tuple[int, int]:
    """Return the launches that receive the host's part of a layer's block: where it is the whole block, and else.

    An addition behind the block receives it. A norm does not; but it is computed with the addition of both parts.
    """
    block = next(call for call in reversed(calls[: end + 1]) if call.op == "ffn")
    readers = {call.op for call in calls if block.makes in call.reads}
    if readers == {"add"}:
        return 0, 0
    return 1, int(readers != {"norm"})


class _Fusion:
    """Finds calls that are computed together, where all are on the accelerator."""

    def __init__(self, calls: Sequence[TalliedCall], weight_bytes: Mapping[str, int], sequences: int) -> None:
        self._calls, self._weight_bytes, self._sequences = calls, weight_bytes, sequences
        self._makers = {call.makes: place for place, call in enumerate(calls)}
        self._readers = Counter(name for call in calls for name in call.reads)
        self._first = next((place for place, call in enumerate(calls) if call.op == "attention"), 0)
        self._joined = self._joined_linears() if sequences == 1 else []

    def launches(self) -> list[int]:
        """Return the launches of each call: 0 where another does its work."""
        found = [call.launches for call in self._calls]
        for group in self._joined:
            for place in group[1:]:
                found[place] = 0
        inside: set[int] = set()
        for place in reversed(range(len(self._calls))):
            if not self._is_addition(place):
                continue
            if (norm := self._norm_behind(place)) is not None:
                found[norm] = 0
            if self._linear_before(place) is not None:
                found[place] = 0
            elif place not in inside:
                others = self._inner_additions(place)
                inside.update(others)
                for other in others:
                    found[other] = 0
        # Embeddings are on the host, with the addition of positions, and the norm behind them is the first transfer's.
        for place, call in enumerate(self._calls[: self._first]):
            if call.op in ("embedding", "add"):
                found[place] = 0
                if (norm := self._norm_behind(place)) is not None:
                    found[norm] = 0
        return found

    def _joined_linears(self) -> list[list[int]]:
        matrices = Counter(call.tensors.get("w") for call in self._calls)
        groups: dict[tuple[str, bool, int], list[int]] = {}
        for place, call in enumerate(self._calls):
            if self._is_linear(place) and matrices[call.tensors["w"]] == 1 and call.width % _ALIGNED_OUTPUTS == 0:
                # Matrices of the same columns have rows of the same bytes in the same format.
                row_bytes = self._weight_bytes[call.tensors["w"]] // call.width
                groups.setdefault((call.reads[0], "bias" in call.tensors, row_bytes), []).append(place)
        return [group for group in groups.values() if len(group) > 1]

    def _is_linear(self, place: int) -> bool:
        call = self._calls[place]
        return call.op == "linear" and "limits" not in call.tensors

    def _is_addition(self, place: int) -> bool:
        return self._calls[place].op == "add" and place > self._first

    def _norm_behind(self, place: int) -> int | None:
        made = self._calls[place].makes
        behind = (other for other in range(place + 1, len(self._calls)) if made in self._calls[other].reads)
        return next((other for other in behind if self._calls[other].op == "norm"), None)

    def _linear_before(self, place: int) -> int | None:
        """Return the projection that does an addition."""
        if self._sequences > 1:
            return None
        joined = {linear for group in self._joined for linear in group}
        first, second = (self._makers.get(name, -1) for name in self._calls[place].reads)
        for added, linear in ((first, second), (second, first)):
            is_free = linear >= 0 and self._is_linear(linear) and linear not in joined and added < linear
            if is_free and self._readers[self._calls[linear].makes] == 1:
                return linear
        return None

    def _inner_additions(self, place: int) -> list[int]:
        """Return the additions that are done with the one at `place`."""
        terms, found = list(self._calls[place].reads), list[int]()
        while len(terms) < _MOST_TERMS:
            inner = next((name for name in terms if self._is_inner(name)), None)
            if inner is None:
                break
            found.append(self._makers[inner])
            at = terms.index(inner)
            terms[at : at + 1] = self._calls[found[-1]].reads
        return found

    def _is_inner(self, name: str) -> bool:
        place = self._makers.get(name)
        is_addition = place is not None and self._is_addition(place) and self._readers[name] == 1
        return is_addition and place is not None and self._linear_before(place) is None
