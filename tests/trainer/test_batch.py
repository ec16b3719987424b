"""Groups → rows: what is trained with which advantage and weight, what is dropped and why."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.config import LossConfig
from agentlightning.samples import SampleSet
from agentlightning.trainer.batch import build_batch, micro_batches
from agentlightning.trainer.policy import TrainingRow
from agentlightning.types import Outcome, Rollout, Sample, float_array, mask_array, token_array

PLAIN = LossConfig(advantage="grpo-no-std")


def sample(rollout: str, trained: int, version: int = 5, context: int = 1) -> Sample:
    n = trained + context
    return Sample(
        rollout, "g", None, token_array(range(n)), mask_array([0] * context + [1] * trained),
        float_array([-1.0] * n), token_array([-1] * context + [version] * trained),
    )  # fmt: skip


def member(name: str, reward, *tokens: int, outcome=None, version=5):
    rollout = Rollout(name, {}, reward=reward, outcome=outcome and Outcome(outcome))
    return rollout, SampleSet(tuple(sample(name, n, version) for n in tokens), {})


def after_server_fault(outcome: str):
    """An agent that saw its model server fail once, and how it ended."""
    rollout, sample_set = member("c", 0.0, 3, outcome=outcome)
    return rollout, SampleSet(sample_set.samples, {"untrainable/upstream_error": 1})


def build(*groups, loss=PLAIN, version=5, max_staleness=2):
    return build_batch(groups, loss=loss, version=version, max_staleness=max_staleness)


def test_a_success_in_three_samples_counts_once_in_the_baseline():
    batch = build([member("a", 1.0, 4, 4, 4), member("b", 0.0, 6)])
    assert [row.advantage for row in batch.rows] == [0.5, 0.5, 0.5, -0.5]
    total = {"a": 0.0, "b": 0.0}
    for row in batch.rows:
        total[row.sample.rollout_id] += row.token_weight * row.sample.trained_tokens
    assert total == pytest.approx({"a": 0.5, "b": 0.5})


@pytest.mark.parametrize(
    ("odd", "reason", "in_baseline"),
    [
        (member("c", None, 3), "no_reward", False),
        (member("c", math.nan, 3), "no_reward", False),
        (member("c", 0.0, 3, outcome="evaluator_error"), "infrastructure", False),
        (member("c", 0.0, 3, outcome="lost"), "infrastructure", False),
        (member("c", 0.0, 3, version=2), "stale", True),
        (member("c", 0.0, 3, version=-1), "unknown_version", True),
        (member("c", 0.0), "no_samples", True),
        (after_server_fault("agent_error"), "model_server_fault", False),
        (after_server_fault("time_limit"), "model_server_fault", False),
    ],
)
def test_what_is_dropped_is_counted_and_leaves_the_loss(odd, reason, in_baseline):
    batch = build([member("a", 1.0, 3), member("b", 0.0, 3), odd])
    assert {row.sample.rollout_id for row in batch.rows} == {"a", "b"}
    assert batch.metrics[f"rollouts_dropped/{reason}"] == 1
    assert batch.metrics["rollouts_trained"] == 2
    assert batch.rows[0].advantage == pytest.approx(2 / 3 if in_baseline else 1 / 2)
    assert all(row.token_weight == pytest.approx(1 / 6) for row in batch.rows)


def test_faults_of_the_agent_are_training_data():
    batch = build([member("a", 1.0, 3), member("b", 0.0, 3, outcome="time_limit")])
    assert len(batch.rows) == 2


def test_rollouts_without_a_signal_keep_their_share_of_the_update():
    batch = build(
        [member("a", 1.0, 2), member("b", 0.0, 2)], [member("c", 1.0, 2), member("d", 1.0, 2)], []
    )
    assert [row.token_weight for row in batch.rows] == [1 / 8] * 4
    assert batch.metrics["groups_without_signal"] == 1
    assert batch.has_signal


def test_a_group_of_one_has_no_signal_and_is_counted():
    batch = build([member("a", 1.0, 2), member("b", None, 2)])
    assert [row.advantage for row in batch.rows] == [0.0]
    assert batch.metrics["groups_of_one"] == 1
    assert not batch.has_signal


def test_staleness_is_of_the_oldest_token_at_the_update():
    mixed = SampleSet((sample("a", 2, version=4), sample("a", 2, version=5)), {})
    batch = build(
        [(Rollout("a", {}, reward=1.0), mixed), member("b", 0.0, 2, version=6)], version=6
    )
    assert (batch.metrics["staleness_mean"], batch.metrics["staleness_max"]) == (1.0, 2.0)


def test_nothing_at_all_is_an_empty_batch():
    batch = build()
    assert batch.rows == ()
    assert not batch.has_signal


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(4, 64))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths, budget):
    rows = [TrainingRow(sample(str(i), n), 1.0, 1.0) for i, n in enumerate(lengths)]
    batches = micro_batches(rows, max_tokens=budget)
    assert sorted(map(id, (r for b in batches for r in b))) == sorted(map(id, rows))
    for batch in batches:
        longest = max(len(row.sample.token_ids) for row in batch)
        assert len(batch) == 1 or len(batch) * longest <= budget


def test_an_agent_that_got_over_a_fault_of_its_server_is_trained():
    batch = build([member("a", 1.0, 3), after_server_fault("completed")])
    assert {row.sample.rollout_id for row in batch.rows} == {"a", "c"}
