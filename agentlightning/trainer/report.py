"""What a run writes at its end: ``summary.json`` and ``reward.png``."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentlightning.config import Config
from agentlightning.trainer.loop import RunResult, Validation
from agentlightning.trainer.statistics import Estimate


def summarise(
    config: Config, result: RunResult, *, policy: str, wall_seconds: float
) -> dict[str, Any]:
    """The content of ``summary.json``. Rewards are means, intervals are 95 %. ``wall_seconds`` is
    the whole command's, start and validations included; ``training_wall_s`` that of the steps
    with their checkpoints, over all parts of a resumed run."""
    progress = result.progress
    return {
        "model": config.model,
        "policy": policy,
        "seed": config.seed,
        "steps": progress.step,
        "updates": progress.policy_version,
        "policy_version": progress.policy_version,
        "rollouts": progress.rollouts,
        "rollouts_trained": len(progress.consumed),
        "excluded": result.excluded,
        "tokens": {"generated": progress.tokens_generated, "trained": progress.tokens_trained},
        "training_wall_s": round(progress.training_seconds, 2),
        "wall_s": round(wall_seconds, 2),
        "validation": _validation(result.before, result.after),
        "versions": _versions(),
        "hardware": hardware(),
    }


def hardware() -> dict[str, Any]:
    """What the run ran on."""
    return {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()}


def plot_rewards(lines: Sequence[Mapping[str, Any]], result: RunResult, path: Path) -> None:
    """Reward of each step, and of the validations with their intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    known = [(line["step"], line["reward"]) for line in lines if line["reward"] is not None]
    if known:
        axes.plot(*zip(*known, strict=True), marker="o", label="training, sampled")
    ends = [(0, result.before), (result.progress.step, result.after)]
    for step, validation in ends:
        if validation is not None and validation.rewards:
            _error_bar(axes, step, validation.reward)
    axes.set(xlabel="step", ylabel="reward")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _error_bar(axes: Any, step: int, reward: Estimate) -> None:
    label = "validation, 95 % interval" if step == 0 else None
    error = reward.half_width if reward.n > 1 else 0.0
    axes.errorbar(step, reward.mean, yerr=error, fmt="s", color="tab:red", capsize=4, label=label)


def _validation(before: Validation | None, after: Validation | None) -> dict[str, Any] | None:
    if before is None:
        return None
    answer: dict[str, Any] = {"before": _estimate(before.reward)}
    if after is not None:
        difference = after.difference(before)
        answer["after"] = _estimate(after.reward)
        answer["difference"] = _finite(difference.mean)
        answer["ci95"] = _interval(difference)
        answer["n"] = difference.n
    return answer


def _estimate(value: Estimate) -> dict[str, Any]:
    return {"reward": _finite(value.mean), "ci95": _interval(value), "n": value.n}


def _interval(value: Estimate) -> list[float | None]:
    return [_finite(value.low), _finite(value.high)]


def _finite(value: float) -> float | None:
    """JSON has neither NaN nor infinity: what is not known is null."""
    return value if math.isfinite(value) else None


def _versions() -> dict[str, str]:
    names = ("agentlightning", "torch", "transformers")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
