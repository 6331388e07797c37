"""The cost model: how long each part of a layer takes, by where it is.

Decoding is bound by reading: a part takes its bytes over the bandwidth of the memory that it is in; of experts, those
that are chosen are read. On the accelerator
its launches take time too; they are counted on the kernels of the lowered model (`launches.count_launches`). A layer's
hybrid step:

    attention ─ predict ─┬─ hot neurons on the accelerator ─┬─ transfer ─ next layer
                         └─ cold neurons on the host ───────┘

    layer = attention + predict + max(hot, cold) + transfer

A predictor that reads what the block of the layer before reads (`previous`) does not wait for that layer's result: the
lowered program makes its mask behind the hot neurons of the layer before, while cold ones are still computed. Both
layers must have their attention on the accelerator, and the second its predictor:

    layer = attention + max(hot + predict of the next layer, cold) + transfer

So its time is hidden as far as the layer before would wait: min(predict, max(0, cold - hot)) of it (`hidden_s`).

A layer skips the transfer if none of its cold neurons fires. So the transfer counts by how often one of them fires:
1 - Π (1 - f) over the cold neurons, which is nearly 1 - exp(-Σ f) if every f is small, and more otherwise. The kernels
of the transfer are launched in any case.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from picompile.placement.firing import LayerFiring
from picompile.placement.machine import Machine
from picompile.placement.model_bytes import CROSSING_LAUNCHES, LayerBytes

GROUP_NEURONS = 64
# Queries, keys and values go to a cache on the host, and the result of attention comes back.
_CACHE_LAUNCHES = 4


@dataclass(frozen=True)
class PartPlaces:
    """Where the parts of a layer that are not neurons are."""

    attention_on_accelerator: bool
    kv_cache_on_accelerator: bool
    predictor_on_accelerator: bool


ALL_ON_ACCELERATOR = PartPlaces(True, True, True)
ALL_ON_HOST = PartPlaces(False, False, False)


def transfer_launches(layer: LayerBytes, where: PartPlaces) -> tuple[int, int, int]:
    """Count the launches that a layer needs because it has parts on both sides, with no, some and all neurons hot.

    These kernels are launched for every token, whether or not a cold neuron fires: they send, and receive where no
    other kernel does. A predictor is assumed to read what the block reads.
    """
    masked_by_host = int(layer.predictor_bytes > 0 and not where.predictor_on_accelerator)
    if not where.attention_on_accelerator:
        # The block's input arrives, and its mask if the host makes one; the result goes back.
        there = 2 + masked_by_host
        return 0, there, there
    cache = 0 if where.kv_cache_on_accelerator else _CACHE_LAUNCHES
    # Input and mask go together; what adds the result receives it.
    alone, beside_hot = layer.launches.receive
    none, some, every = 1 + alone, 1 + beside_hot, 0
    if masked_by_host:
        # The predictor needs the input even if no neuron is cold, and the hot neurons need a mask.
        some, every = some + 1, 2
    return none + cache, some + cache, every + cache


@dataclass(frozen=True, eq=False)
class Times:
    """Seconds of each part, by the number of groups on the accelerator: float64 [groups + 1] each.

    `exchange_s` has all transfers of the layer, and every launch that it needs because it has parts on both sides.
    `attention_s` is for reading weights, `kv_cache_s` for reading the cache.
    """

    attention_s: NDArray[np.float64]
    kv_cache_s: NDArray[np.float64]
    predict_s: NDArray[np.float64]
    hot_s: NDArray[np.float64]
    cold_s: NDArray[np.float64]
    exchange_s: NDArray[np.float64]

    @property
    def total_s(self) -> NDArray[np.float64]:
        """The layer's seconds."""
        before = self.attention_s + self.kv_cache_s + self.predict_s
        return before + np.maximum(self.hot_s, self.cold_s) + self.exchange_s

    def at(self, groups: int) -> Mapping[str, float]:
        """Return the seconds of each part, by name, with so many groups on the accelerator."""
        return MappingProxyType({name: float(values[groups]) for name, values in vars(self).items()})


def hidden_s(predict_s: float, before: Times) -> NDArray[np.float64]:
    """Return the seconds of a prediction of `predict_s` that are hidden in the layer before: float64 [groups + 1].

    The accelerator makes it while that layer, with the times `before`, waits for its cold neurons.
    """
    return np.minimum(predict_s, np.maximum(before.cold_s - before.hot_s, 0.0))


def group_count(neurons: int) -> int:
    """Return the number of groups in a layer; the last may be short."""
    return -(-neurons // GROUP_NEURONS)


def computed_by_groups(firing: LayerFiring) -> NDArray[np.float64]:
    """Return how many neurons of the first n groups are computed for a token, n from 0 on: float64 [groups + 1]."""
    neurons = len(firing.shares)
    ends = np.minimum(np.arange(group_count(neurons) + 1) * GROUP_NEURONS, neurons)
    computed: NDArray[np.float64] = firing.computed_sums[ends]
    return computed


@dataclass(frozen=True, eq=False)
class LayerTimes:
    """The cost model of one layer.

    `kv_cache_read_bytes` of its cache are read for a token, of all sequences together. `crossing_bytes` go each way in
    a transfer: the block's input and its mask to the host, its result back.
    """

    layer: LayerBytes
    firing: LayerFiring
    machine: Machine
    kv_cache_read_bytes: float
    crossing_bytes: float

    def times(self, where: PartPlaces) -> Times:
        """Return the layer's times with its parts placed so, for every number of groups on the accelerator."""
        layer, launches = self.layer, self.layer.launches
        size = group_count(layer.neurons) + 1
        shared = layer.attention_bytes + layer.shared_bytes
        attention = self._read(shared, where.attention_on_accelerator, launches.attention)
        kv_cache = self._read(self.kv_cache_read_bytes, where.kv_cache_on_accelerator, launches.kv_cache)
        predict = self.predict_s(where.predictor_on_accelerator)
        hot, cold = self._neurons()
        transfer = self._transfers(where)
        return Times(
            np.full(size, attention),
            kv_cache_s=np.full(size, kv_cache),
            predict_s=np.full(size, predict),
            hot_s=hot,
            cold_s=cold,
            exchange_s=transfer,
        )

    def predict_s(self, on_accelerator: bool) -> float:
        """Return the seconds of the layer's predictor; 0 if it has no weights of its own."""
        if not self.layer.predictor_bytes:
            return 0.0
        return self._read(self.layer.predictor_bytes, on_accelerator, self.layer.launches.predictor)

    def _read(self, read_bytes: float, on_accelerator: bool, launches: int) -> float:
        if on_accelerator:
            return read_bytes / self.machine.gpu_read_bytes_per_s + launches * self.machine.launch_s
        return read_bytes / self.machine.host_read_bytes_per_s

    def _neurons(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        layer, machine = self.layer, self.machine
        computed = self._computed
        ends = np.minimum(np.arange(len(computed)) * GROUP_NEURONS, layer.neurons)
        skipped = layer.neuron_bytes - layer.gating_bytes
        gating = self.firing.chosen * layer.gating_bytes
        hot = ends * gating + computed * skipped
        cold = (layer.neurons - ends) * gating + (computed[-1] - computed) * skipped
        launches = np.where(ends > 0, layer.hot_launches * machine.launch_s, 0.0)
        hot_s = launches if machine.gpu_bytes == 0 else hot / machine.gpu_read_bytes_per_s + launches
        return hot_s, cold / machine.host_read_bytes_per_s

    def _transfers(self, where: PartPlaces) -> NDArray[np.float64]:
        """Return the seconds of the layer's transfers and their launches, in the mean over tokens."""
        groups = group_count(self.layer.neurons)
        number = np.zeros(groups + 1)
        if where.attention_on_accelerator:
            number[:-1] = self._cold_fires[:-1]
            if self.layer.predictor_bytes and not where.predictor_on_accelerator:
                # The predictor's input goes to the host and the mask comes back; if some neurons are hot and some
                # cold, a result comes back as well.
                number[:] = 1.0
                number[1:-1] += self._cold_fires[1:-1]
        else:
            number[1:] = 1.0
        if where.attention_on_accelerator and not where.kv_cache_on_accelerator:
            number += 1.0
        none, some, every = transfer_launches(self.layer, where)
        launches = np.full(groups + 1, some)
        launches[0], launches[-1] = none, every
        # The kernels that send and receive are part of a transfer's time, and are launched even if nobody waits.
        launched_s = CROSSING_LAUNCHES * self.machine.launch_s
        crossing_s = max(0.0, self.machine.crossing_s(2 * self.crossing_bytes) - launched_s)
        return number * crossing_s + launches * self.machine.launch_s

    @cached_property
    def _computed(self) -> NDArray[np.float64]:
        return computed_by_groups(self.firing)

    @cached_property
    def _cold_fires(self) -> NDArray[np.float64]:
        """The share of the tokens for which a cold neuron is computed: float64 [groups + 1]."""
        groups, neurons = group_count(self.layer.neurons), len(self.firing.shares)
        if self.layer.gating_bytes:
            # The gating matrix is read for every cold neuron, whether or not it fires.
            return np.concatenate((np.ones(groups), [0.0]))
        ends = np.minimum(np.arange(groups + 1) * GROUP_NEURONS, neurons)
        fires: NDArray[np.float64] = -np.expm1(self.firing.silent_logs[ends])
        return fires
