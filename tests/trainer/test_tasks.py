from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import ConfigError
from agentlightning.trainer.tasks import TaskOrder, load_tasks


def test_loads_one_object_a_line_and_skips_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"q": 1}\n\n{"q": "zwölf"}\n', encoding="utf-8")
    assert load_tasks(path) == [{"q": 1}, {"q": "zwölf"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"q": 1}\n{"q": \n', "line 2 is not JSON"),
        ('{"q": 1}\n[1]\n', "line 2 is a list"),
        ("\n", "holds no task"),
        ('{"q": NaN}', "it has no number NaN"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_tasks(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl"):
        load_tasks(tmp_path / "nowhere.jsonl")


@given(size=st.integers(1, 20), seed=st.integers(0, 5), shuffle=st.booleans())
def test_each_epoch_takes_each_task_once(size: int, seed: int, shuffle: bool) -> None:
    order = TaskOrder(range(size), seed=seed, shuffle=shuffle)
    for epoch in range(3):
        drawn = [order[n] for n in range(epoch * size, (epoch + 1) * size)]
        assert sorted(drawn) == list(range(size))


def test_a_position_is_all_the_state_there_is() -> None:
    def order() -> TaskOrder:
        return TaskOrder(range(50), seed=3, shuffle=True)

    one_go = order()
    assert [one_go[n] for n in range(60, 120)] == [order()[n] for n in range(60, 120)]


def test_epochs_and_seeds_differ() -> None:
    order, other = (TaskOrder(range(50), seed=s, shuffle=True) for s in (1, 2))
    first = [order[n] for n in range(50)]
    assert first != [order[n] for n in range(50, 100)]
    assert first != [other[n] for n in range(50)]
