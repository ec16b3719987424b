"""What ``/metrics`` tells."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from agentlightning.gateway.gate import Gate
from agentlightning.types import Call


class Metrics:
    """One registry per gateway."""

    def __init__(self, gate: Gate) -> None:
        self.registry = CollectorRegistry()
        self._calls = Counter(
            "agl_calls",
            "Calls recorded.",
            ["dialect", "status", "trainable", "reason"],
            registry=self.registry,
        )
        tokens = Counter("agl_tokens", "Tokens recorded.", ["kind"], registry=self.registry)
        self._prompt_tokens = tokens.labels("prompt")
        self._completion_tokens = tokens.labels("completion")
        self._refused = Counter(
            "agl_refused", "Requests that the gateway refused.", ["code"], registry=self.registry
        )
        self._added = Histogram(
            "agl_added_seconds",
            "Time between a model server's last byte and the commit of the call.",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0),
            registry=self.registry,
        )
        self._record_failed = Counter(
            "agl_record_failed", "Calls that could not be recorded.", registry=self.registry
        )
        inflight = Gauge("agl_inflight", "Calls at a model server.", registry=self.registry)
        inflight.set_function(lambda: gate.inflight)
        held = Gauge("agl_held", "Calls held by a pause.", registry=self.registry)
        held.set_function(lambda: gate.held)

    def recorded(self, call: Call, added_seconds: float) -> None:
        """A call was committed."""
        trainable = "true" if call.trainable else "false"
        self._calls.labels(call.dialect, call.status, trainable, call.reason or "").inc()
        self._prompt_tokens.inc(len(call.prompt_ids))
        self._completion_tokens.inc(sum(len(c.token_ids) for c in call.completions))
        self._added.observe(added_seconds)

    def refused(self, code: str) -> None:
        """A request got an error of the gateway's own."""
        self._refused.labels(code).inc()

    def record_failed(self) -> None:
        """The store did not take a call."""
        self._record_failed.inc()

    def text(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)
