"""What the engine counts, in Prometheus' text form."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from agentlightning.trainer.serve.engine import Engine

_PREFIX = "agl_serve_"


class _EngineCollector:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine, stats = self._engine, self._engine.stats
        gauges = {
            "running": ("Sequences being decoded.", engine.running),
            "waiting": ("Sequences that wait for room.", engine.waiting),
            "cache_rows_used": ("Tokens held in the key-value pool.", engine.rows_used),
            "policy_version": ("Version of the weights that serve.", engine.version),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(_PREFIX + name, text, value)
        counters = {
            "steps": ("Forward passes.", stats.steps),
            "prompt_tokens": ("Prompt tokens of admitted sequences.", stats.prompt_tokens),
            "cached_prompt_tokens": (
                "Prompt tokens whose keys and values were reused.",
                stats.cached_prompt_tokens,
            ),
            "generated_tokens": ("Tokens sampled.", stats.generated_tokens),
            "preemptions": ("Sequences put back for want of room.", stats.preemptions),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(_PREFIX + name, text, value)
        finished = CounterMetricFamily(
            _PREFIX + "finished", "Sequences that ended, by reason.", labels=["reason"]
        )
        for reason, count in list(stats.finished.items()):
            finished.add_metric([reason], count)
        yield finished


def metrics_text(engine: Engine) -> str:
    """The engine's numbers now."""
    registry = CollectorRegistry()
    registry.register(_EngineCollector(engine))
    return generate_latest(registry).decode()
