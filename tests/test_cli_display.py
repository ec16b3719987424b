from __future__ import annotations

import io

from rich.console import Console

from agentlightning.cli.display import Display, step_row
from agentlightning.trainer.statistics import estimate

LINE = {
    "step": 3,
    "steps": 12,
    "reward": 0.5,
    "groups": 6.0,
    "groups_without_signal": 1.0,
    "samples_per_rollout": 1.25,
    "staleness_max": 0.0,
    "tokens_per_second": 211.4,
    "training_seconds": 60.0,
}


def test_a_row_holds_what_a_person_follows() -> None:
    cells = step_row(LINE).split()
    assert cells == ["3/12", "0.50", "▅", "5", "of", "6", "1.25", "0", "211", "1:00", "3:00"]


def test_a_step_without_any_reward_says_so() -> None:
    assert "none" in step_row({**LINE, "reward": None})


def test_piped_output_is_plain_lines_without_the_live_one() -> None:
    output = io.StringIO()
    with Display(Console(file=output, highlight=False, soft_wrap=True)) as display:
        display.phase("rollouts", 3, 48)
        display.step(LINE)
        display.validation("after", estimate([1.0, 0.0, 1.0, 1.0]))
        display.warn("look here")
    lines = output.getvalue().splitlines()
    assert lines[0].split()[:2] == ["step", "reward"]
    assert lines[2] == "after    4 tasks, reward 0.75 ± 0.79"
    assert lines[3] == "warning  look here"
    assert "rollouts 3" not in output.getvalue()


def test_a_terminal_sees_where_a_step_is_and_what_is_left() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100, highlight=False)
    with Display(console) as display:
        display.step(LINE)
        display.phase("rollouts", 31, 48)
    text = output.getvalue()
    assert "step 4 of 12: rollouts 31 of 48" in text
    assert "about 3:00 of training left" in text
