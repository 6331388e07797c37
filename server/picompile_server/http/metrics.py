"""GET /metrics: the server's figures in Prometheus' format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from picompile_runtime.version import __version__
from picompile_server.model import ServedModel
from picompile_server.request import AnswerTimes
from picompile_server.stats import SchedulerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.5, 1, 2.5)

# Name, what it is, and its value.
_Value = Callable[[SchedulerStats], float | None]
_GAUGES: tuple[tuple[str, str, _Value], ...] = (
    ("queue_requests", "Requests that wait for a slot", lambda stats: stats.waiting),
    ("reading_requests", "Requests whose prompt is being read", lambda stats: stats.reading),
    ("decoding_requests", "Requests whose answer is being generated", lambda stats: stats.decoding),
    ("kv_tokens", "Tokens in the KV cache", lambda stats: stats.held_tokens),
    ("kv_reserved_tokens", "Tokens that running answers may come to hold", lambda stats: stats.reserved_tokens),
    ("kv_capacity_tokens", "Tokens that the KV cache has room for", lambda stats: stats.capacity_tokens),
    ("fired_ratio", "Share of the neurons that fired in the latest steps", lambda stats: stats.fired_share),
)
_COUNTERS: tuple[tuple[str, str, _Value], ...] = (
    ("prompt_tokens", "Tokens of prompts, cached ones included", lambda stats: stats.prompt_tokens),
    ("cached_tokens", "Tokens of prompts that were in the KV cache", lambda stats: stats.cached_tokens),
    ("generated_tokens", "Tokens of answers", lambda stats: stats.generated_tokens),
    ("drafted_tokens", "Tokens of drafts that were checked", lambda stats: stats.drafted_tokens),
    ("accepted_tokens", "Tokens of drafts that were right", lambda stats: stats.accepted_tokens),
    ("decode_steps", "Steps that read one token of each running answer", lambda stats: stats.decode_steps),
    ("prompt_seconds", "Time of the engine for prompts", lambda stats: stats.prompt_s),
    ("decode_seconds", "Time of the engine for steps of answers", lambda stats: stats.decode_s),
)


class Metrics:
    """The counts of a server, in a registry of its own. Use it from one thread."""

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        """Make metrics that ask the schedulers of `models` when they are read; models may be added later."""
        self._registry = CollectorRegistry()
        self._registry.register(_SchedulerCollector(models))
        ProcessCollector(registry=self._registry)
        build = Gauge("picompile_build_info", "The version that runs; always 1", ["version"], registry=self._registry)
        build.labels(__version__).set(1)
        self._first = Histogram(
            "picompile_time_to_first_token_seconds",
            "Time from a request to the first token of its answer",
            ["model"],
            registry=self._registry,
            buckets=_FIRST_S,
        )
        self._between = Histogram(
            "picompile_time_between_tokens_seconds",
            "Time from one token of an answer to the next",
            ["model"],
            registry=self._registry,
            buckets=_BETWEEN_S,
        )
        self._answers = Counter(
            "picompile_answers", "Answers that ended, by the reason", ["model", "outcome"], registry=self._registry
        )
        self._responses = Counter(
            "picompile_http_responses", "HTTP responses", ["path", "status"], registry=self._registry
        )

    def token_observer(self, model: str) -> Callable[[float], None]:
        """Return a function that records a token of `model`, given the seconds since the one before it."""
        return self._between.labels(model).observe

    def note_answer(self, model: str, outcome: str, times: AnswerTimes | None, tokens: int) -> None:
        """Note that an answer of so many `tokens` has ended."""
        self._answers.labels(model, outcome).inc()
        if times is not None and tokens:
            self._first.labels(model).observe(times.first_token_s - times.submitted_s)

    def note_response(self, path: str, status: int) -> None:
        """Record that a request was answered; `path` is its route's."""
        self._responses.labels(path, str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class _SchedulerCollector(Collector):
    """Reads the statistics of schedulers when they are asked for."""

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Yield each metric, with a value for each model."""
        stats = {name: model.scheduler.stats() for name, model in self._models.items()}
        slots = GaugeMetricFamily("picompile_slots", "Slots of the KV cache", labels=["model"])
        for name, model in self._models.items():
            slots.add_metric([name], model.engine.sequences)
        yield slots
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for metric, what, value in table:
                family = kind(f"picompile_{metric}", what, labels=["model"])
                for name, each in stats.items():
                    if (number := value(each)) is not None:
                        family.add_metric([name], number)
                yield family
