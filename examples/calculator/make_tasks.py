"""Writes train.jsonl and val.jsonl: the same files each time.

    python examples/calculator/make_tasks.py

A task is a question of two or three numbers, such as "Take 12, multiply by 7, add 5.", and its
answer. Only questions whose steps give the same as the expression 12 * 7 + 5 are kept: none
depends on which operation binds tighter. No validation question is a training question.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

SEED = 20
TRAIN, VAL = 2000, 256
STEPS = {"+": "add {}", "-": "subtract {}", "*": "multiply by {}"}


def make_task(rng: random.Random) -> dict[str, str]:
    """One task; the numbers are 2 to 99."""
    while True:
        numbers = [rng.randint(2, 99) for _ in range(rng.choice((2, 3)))]
        operators = [rng.choice("+-*") for _ in numbers[1:]]
        if operators[1:] != ["*"]:
            return _task(numbers, operators)


def _task(numbers: list[int], operators: list[str]) -> dict[str, str]:
    value = numbers[0]
    steps = [f"Take {value}"]
    for operator, number in zip(operators, numbers[1:], strict=True):
        value = {"+": value + number, "-": value - number, "*": value * number}[operator]
        steps.append(STEPS[operator].format(number))
    return {"question": ", ".join(steps) + ".", "answer": str(value)}


def make_tasks(count: int) -> list[dict[str, str]]:
    """``count`` different tasks."""
    rng = random.Random(SEED)
    tasks: dict[str, dict[str, str]] = {}
    while len(tasks) < count:
        task = make_task(rng)
        tasks.setdefault(task["question"], task)
    return list(tasks.values())


def main() -> None:
    folder = Path(__file__).parent
    tasks = make_tasks(TRAIN + VAL)
    for name, part in (("train", tasks[:TRAIN]), ("val", tasks[TRAIN:])):
        lines = [json.dumps(task) + "\n" for task in part]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
