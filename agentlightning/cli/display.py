"""What a run shows while it goes on: a row a step, and on a terminal a live line below."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from agentlightning.trainer.statistics import Estimate

_BARS = "▁▂▃▄▅▆▇█"
_HEADER = (
    f"{'step':>7}  {'reward':>8}  {'groups with signal':>18}  {'samples/rollout':>15}"
    f"  {'stale':>5}  {'tok/s':>6}  {'time':>6}  {'left':>6}"
)


class Display:
    """Prints facts as lines, step by step; piped output gets the same lines without the live one.

    Use as a context manager: the live line is gone at the end, however that comes.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, transient=True, auto_refresh=False)
        self._headed = False
        self._started = time.monotonic()
        self._done, self._steps, self._step_seconds = 0, 0, 0.0

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def fact(self, name: str, text: str) -> None:
        """A line such as ``gateway  http://127.0.0.1:41873``."""
        self._console.print(Text(f"{name:<8} {text}"))

    def phase(self, name: str, done: int, total: int) -> None:
        if self._live.is_started:
            self._live.update(Text(self._phase_line(name, done, total), style="dim"), refresh=True)

    def _phase_line(self, name: str, done: int, total: int) -> str:
        count = f" {done} of {total}" if total > 1 else ""
        elapsed = _clock(time.monotonic() - self._started)
        if self._done == self._steps:
            return f"{name}{count}   {elapsed} elapsed"
        left = _clock(self._step_seconds * (self._steps - self._done))
        return (
            f"step {self._done + 1} of {self._steps}: {name}{count}   "
            f"{elapsed} elapsed, about {left} of training left"
        )

    def step(self, line: Mapping[str, Any]) -> None:
        if not self._headed:
            self._console.print(Text(_HEADER, style="bold"))
            self._headed = True
        self._console.print(Text(step_row(line)))
        self._done, self._steps = line["step"], line["steps"]
        self._step_seconds = line["training_seconds"] / line["step"]

    def validation(self, name: str, reward: Estimate) -> None:
        self.fact(name, f"{reward.n} tasks, reward {reward.mean:.2f} ± {reward.half_width:.2f}")

    def warn(self, text: str) -> None:
        self._console.print(Text(f"{'warning':<8} {text}", style="yellow"))


def step_row(line: Mapping[str, Any]) -> str:
    """One step as a row below the header."""
    reward = line["reward"]
    shown = "none" if reward is None else f"{reward:.2f} {_bar(reward)}"
    elapsed = line["training_seconds"]
    left = elapsed / line["step"] * (line["steps"] - line["step"])
    signal = f"{line['groups'] - line['groups_without_signal']:.0f} of {line['groups']:.0f}"
    return (
        f"{line['step']:>3}/{line['steps']:<3}  {shown:>8}  {signal:>18}"
        f"  {line['samples_per_rollout']:>15.2f}  {line['staleness_max']:>5.0f}"
        f"  {line['tokens_per_second']:>6.0f}  {_clock(elapsed):>6}  {_clock(left):>6}"
    )


def _bar(reward: float) -> str:
    return _BARS[max(0, min(len(_BARS) - 1, int(reward * len(_BARS))))]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
