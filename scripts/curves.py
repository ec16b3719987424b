"""Learning curves of several runs as one plot and one Markdown table.

python scripts/curves.py runs/calculator-1 runs/calculator-2 --out docs/curves.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def read(run: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Summary and steps of a run."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return json.loads((run / "summary.json").read_text()), [json.loads(line) for line in lines]


def plot(runs: list[Path], out: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for number, run in enumerate(runs):
        summary, steps = read(run)
        colour, label = f"C{number}", f"seed {summary['seed']}"
        xs, ys = [line["step"] for line in steps], [line["reward"] for line in steps]
        axes.plot(xs, ys, marker=".", color=colour, label=label)
        ends = [summary["validation"][end]["reward"] for end in ("before", "after")]
        axes.plot([0, summary["steps"]], ends, "s", color=colour, fillstyle="none")
    axes.set(xlabel="update", ylabel="reward (squares: validation)", ylim=(0, 1.05))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=100)


def table(runs: list[Path]) -> str:
    rows = ["| seed | before | reward of each update | after | difference (95 %) | training |"]
    rows.append("|---|---|---|---|---|---|")
    for run in runs:
        summary, steps = read(run)
        validation = summary["validation"]
        low, high = validation["ci95"]
        curve = " ".join(f"{line['reward']:.2f}" for line in steps)
        rows.append(
            f"| {summary['seed']} | {validation['before']['reward']:.2f} | {curve} "
            f"| {validation['after']['reward']:.2f} "
            f"| {validation['difference']:+.2f} ({low:+.2f} … {high:+.2f}), n={validation['n']} "
            f"| {summary['training_wall_s']:.0f} s |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    plot(arguments.runs, arguments.out)
    print(table(arguments.runs))


if __name__ == "__main__":
    main()
