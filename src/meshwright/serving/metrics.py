"""Prometheus metrics of a server, under vLLM's names with the prefix `meshwright:`. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from meshwright.serving.choices import Choice, Piece
from meshwright.serving.replicas import Replicas

PREFIX = "meshwright:"
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE = (0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = tuple(2**power for power in range(0, 21, 2))

# (kind, name, key of Replicas.stats, description)
_ENGINE: tuple[tuple[Any, str, str, str], ...] = (
    (GaugeMetricFamily, "num_requests_running", "running", "Sequences that are computed in steps."),
    (GaugeMetricFamily, "num_requests_waiting", "waiting", "Sequences that wait for admission."),
    (GaugeMetricFamily, "num_requests_paused", "paused", "Sequences that wait with their KV blocks until others end."),
    (GaugeMetricFamily, "kv_cache_usage_perc", "usage", "Held share of the KV blocks, 0 to 1."),
    (CounterMetricFamily, "prefix_cache_queries", "prefix_queries", "Prompt tokens looked up in the prefix cache."),
    (CounterMetricFamily, "prefix_cache_hits", "prefix_hits", "Prompt tokens found in the prefix cache."),
    (CounterMetricFamily, "engine_steps", "steps", "Steps computed."),
    (CounterMetricFamily, "engine_step_seconds", "step_seconds", "Measured time of all steps."),
    (CounterMetricFamily, "engine_kernel_seconds", "kernel_seconds", "Time of the steps inside kernels."),
    (CounterMetricFamily, "engine_predicted_step_seconds", "predicted_seconds", "Predicted time of the same steps."),
    (CounterMetricFamily, "pauses", "pauses", "Times that a sequence was paused."),
    (CounterMetricFamily, "rank_restarts", "restarts", "Restarts after a lost rank."),
    (GaugeMetricFamily, "refused_places_outstanding", "outstanding", "Refused requests that keep a place in the line."),
    (CounterMetricFamily, "refused_places_admitted", "admitted", "Places whose clients returned and were admitted."),
    (CounterMetricFamily, "refused_places_expired", "expired", "Places whose clients did not return in time."),
)
_BLOCK_STATES = ("free", "cached", "held")


# (name, buckets, description)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", _FIRST, "From the request to its first token."),
    ("request_queue_time_seconds", _WHOLE, "From the request to its admission by the engine."),
    ("request_prefill_time_seconds", _WHOLE, "From the admission to the first token."),
    ("inter_token_latency_seconds", _BETWEEN, "Between two tokens of a sequence."),
    ("request_time_per_output_token_seconds", _BETWEEN, "Mean time of a token after the first."),
    ("e2e_request_latency_seconds", _WHOLE, "From the request to its last token."),
    ("request_prompt_tokens", _TOKENS, "Tokens of a prompt."),
    ("request_generation_tokens", _TOKENS, "Tokens of an answer."),
)


class ServingMetrics:
    """Prometheus metrics of a server: counters and histograms of requests, and figures of the engine `client`, read
    when the page is requested. model: value of the label `model_name`. Attribute `registry`: all metrics."""

    def __init__(self, client: Replicas, model: str) -> None:
        """Register all metrics in a new registry; arguments: see the class."""
        self.registry = CollectorRegistry()
        self._client, self._model = client, model
        self.registry.register(self)
        self._histograms = {
            name: Histogram(PREFIX + name, text, ["model_name"], registry=self.registry, buckets=buckets).labels(model)
            for name, buckets, text in _HISTOGRAMS
        }
        self._prompt_tokens = self._add_counter("prompt_tokens", "Prompt tokens of finished sequences.").labels(model)
        self._generation_tokens = self._add_counter("generation_tokens", "Tokens generated.").labels(model)
        self._ended = self._add_counter("request_success", "Sequences that ended, by reason.", "finished_reason")
        self._refused = self._add_counter("requests_refused", "HTTP requests that were not queued, by limit.", "reason")

    def _add_counter(self, name: str, text: str, *labels: str) -> Counter:
        """Register and return the Prometheus counter `name` (without the common prefix) with the description `text`.
        labels: names of the counter's labels besides `model_name`."""
        return Counter(PREFIX + name, text, ["model_name", *labels], registry=self.registry)

    def observe(self, choice: Choice, piece: Piece, known: int, before: float) -> None:
        """Record the tokens and latencies of a new piece of a choice (an API answer). known, before: the choice's
        `completion_tokens` and `last_token` before this piece, whose tokens may include those of an echoed prompt."""
        if choice.completion_tokens > known:
            self._generation_tokens.inc(choice.completion_tokens - known)
            if not known:
                self._histograms["time_to_first_token_seconds"].observe(choice.last_token - choice.created)
                waited = choice.last_token - choice.created - choice.prefill_seconds
                self._histograms["request_queue_time_seconds"].observe(max(0.0, waited))
                self._histograms["request_prefill_time_seconds"].observe(choice.prefill_seconds)
            else:
                self._histograms["inter_token_latency_seconds"].observe(choice.last_token - before)
        if piece.finish_reason is not None:
            self.finish(choice, piece.finish_reason)

    def finish(self, choice: Choice, reason: str) -> None:
        """Record that a choice (an API answer) has ended. reason: its finish reason ("stop", "length"), or "abort" if
        the client disconnected or the request timed out."""
        self._ended.labels(self._model, reason).inc()
        if reason == "abort":
            return
        self._prompt_tokens.inc(len(choice.request.tokens))
        self._histograms["request_prompt_tokens"].observe(len(choice.request.tokens))
        self._histograms["request_generation_tokens"].observe(choice.completion_tokens)
        if choice.completion_tokens:
            self._histograms["e2e_request_latency_seconds"].observe(choice.last_token - choice.created)
            if choice.completion_tokens > 1:
                mean = (choice.last_token - choice.first_token) / (choice.completion_tokens - 1)
                self._histograms["request_time_per_output_token_seconds"].observe(mean)

    def refuse(self, reason: str) -> None:
        """Count an HTTP request that was not queued. reason: label, such as "requests" or "connections"."""
        self._refused.labels(self._model, reason).inc()

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's metrics with their present values, read from `Replicas.stats`, one time series per replica
        (label `engine`). Called by the registry when the page is formatted."""
        labels, replicas = ["model_name", "engine"], []
        for number, stats in enumerate(self._client.stats()):
            usage = stats.get("held", 0) / max(sum(stats.get(state, 0) for state in _BLOCK_STATES), 1)
            replicas.append(([self._model, str(number)], {**stats, "usage": usage}))
        for kind, name, key, text in _ENGINE:
            metric = kind(PREFIX + name, text, labels=labels)
            for place, stats in replicas:
                metric.add_metric(place, stats.get(key, 0))
            yield metric
        blocks = GaugeMetricFamily(PREFIX + "kv_blocks", "KV blocks by state.", labels=[*labels, "state"])
        for place, stats in replicas:
            for state in _BLOCK_STATES:
                blocks.add_metric([*place, state], stats.get(state, 0))
        yield blocks
