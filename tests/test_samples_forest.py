"""Calls → samples: the forest, what is trained, what is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.samples import SampleSet, build_samples
from agentlightning.types import (
    Call,
    Completion,
    Rollout,
    VersionSpan,
    float_array,
    token_array,
)

ROLLOUT = Rollout("r", {}, group_id="g", attempt_id="a", attempt=1, reward=1.0)


def call(name: str, prompt: list[int], *answers: list[int], **fields) -> Call:
    """Each sampled token's logprob tells which call and position it came from."""
    base = -float(sum(map(ord, name)))
    completions = tuple(
        Completion(token_array(a), float_array(base - i for i in range(len(a)))) for a in answers
    )
    fields = {"version_start": 3, **fields}
    return Call(name, "r", "a", token_array(prompt), completions, **fields)


def rows(result: SampleSet) -> list[tuple[list[int], list[int]]]:
    return sorted((list(s.token_ids), list(s.loss_mask)) for s in result.samples)


def test_a_conversation_is_one_sample_with_context_between_the_turns():
    first = call("a", [1, 2], [3, 4])
    second = call("b", [1, 2, 3, 4, 9, 9], [5])
    result = build_samples(ROLLOUT, [first, second])
    (sample,) = result.samples
    assert list(sample.token_ids) == [1, 2, 3, 4, 9, 9, 5]
    assert list(sample.loss_mask) == [0, 0, 1, 1, 0, 0, 1]
    assert list(sample.rollout_logprobs) == [0, 0, -97, -98, 0, 0, -98]
    assert list(sample.policy_versions) == [-1, -1, 3, 3, -1, -1, 3]
    assert (sample.rollout_id, sample.group_id, sample.reward) == ("r", "g", 1.0)
    assert result.counts == {"calls": 2, "roots": 1}


def test_interleaved_conversations_separate_by_content():
    a1, b1 = call("a1", [1], [2]), call("b1", [6], [7])
    a2, b2 = call("a2", [1, 2, 0], [3]), call("b2", [6, 7, 0], [8])
    result = build_samples(ROLLOUT, [a1, b1, a2, b2])
    assert rows(result) == [([1, 2, 0, 3], [0, 1, 0, 1]), ([6, 7, 0, 8], [0, 1, 0, 1])]
    assert result.counts == {"calls": 4, "roots": 2, "root/independent": 1}


def test_a_shared_turn_is_trained_in_one_branch_only():
    shared = call("a", [1], [2])
    left, right = call("l", [1, 2, 5], [6]), call("r", [1, 2, 7], [8])
    result = build_samples(ROLLOUT, [shared, left, right])
    assert sum(s.loss_mask[1] for s in result.samples) == 1
    assert [s.loss_mask[3] for s in result.samples] == [1, 1]
    assert result.counts["branches"] == 1


def test_several_completions_of_one_prompt_are_all_trained():
    result = build_samples(ROLLOUT, [call("a", [1], [2], [3], [2])])
    assert [ids for ids, _ in rows(result)] == [[1, 2], [1, 2], [1, 3]]
    assert result.trained_tokens == 3


def test_equal_answers_of_equal_prompts_are_not_duplicates():
    calls = [call(name, [1], [2]) for name in "abc"] + [call("d", [1, 2, 3], [4])]
    result = build_samples(ROLLOUT, calls)
    assert result.trained_tokens == 4
    assert result.counts["orphans"] == 2


def test_other_tokens_in_place_of_an_answer_start_a_new_root():
    he_llo = call("a", [1, 2], [10, 11])
    hello = call("b", [1, 2, 12, 5], [6])
    result = build_samples(ROLLOUT, [he_llo, hello])
    assert rows(result) == [
        ([1, 2, 10, 11], [0, 0, 1, 1]),
        ([1, 2, 12, 5, 6], [0, 0, 0, 0, 1]),
    ]
    assert result.counts == {"calls": 2, "roots": 2, "root/retokenised": 1}


def test_retokenising_a_later_answer_is_a_branch_with_that_cause():
    calls = [
        call("a", [1], [2]),
        call("b", [1, 2, 5], [6, 7]),
        call("c", [1, 2, 5, 6, 8, 5], [9]),
    ]
    counts = build_samples(ROLLOUT, calls).counts
    assert counts == {"calls": 3, "roots": 1, "branches": 1, "branch/retokenised": 1}


def test_a_history_edited_within_context_is_a_root_with_that_cause():
    calls = [call("a", [1, 2, 3, 4], [5]), call("b", [1, 2, 9, 5, 6], [7])]
    assert build_samples(ROLLOUT, calls).counts["root/history_edited"] == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"trainable": False, "reason": "ids_mismatch"}, "ids_mismatch"),
        ({"trainable": False, "status": "undelivered"}, "undelivered"),
        ({"status": "error"}, "error"),
    ],
)
def test_an_untrainable_call_is_context_of_what_continues_it(fields, reason):
    calls = [call("a", [1], [2], **fields), call("b", [1, 2, 3], [4])]
    result = build_samples(ROLLOUT, calls)
    assert rows(result) == [([1, 2, 3, 4], [0, 0, 0, 1])]
    assert result.counts[f"untrainable/{reason}"] == 1


def test_nothing_is_invented_for_logprobs_that_are_missing_short_or_not_finite():
    good = call("a", [1], [2, 3])
    bad = [None, float_array([-1.0]), float_array([-1.0, float("nan")])]
    calls = [
        replace(good, call_id=str(i), completions=(Completion(token_array([2, 3]), logprobs),))
        for i, logprobs in enumerate(bad)
    ]
    result = build_samples(ROLLOUT, calls)
    assert result.samples == ()
    assert result.counts["untrainable/logprobs"] == 3


def test_an_untrainable_leaf_gives_no_sample_and_no_tail():
    calls = [call("a", [1], [2]), call("b", [1, 2, 3], [4], trainable=False, reason="aborted")]
    assert rows(build_samples(ROLLOUT, calls)) == [([1, 2], [0, 1])]


def test_an_empty_completion_and_a_call_without_prompt_give_nothing():
    result = build_samples(ROLLOUT, [call("a", [1], []), call("b", [], [4])])
    assert result.samples == ()
    assert result.counts["completions/empty"] == 1
    assert result.counts["untrainable/no_prompt"] == 1


def test_only_the_current_attempt_is_trained():
    old = replace(call("a", [1], [2]), attempt_id="a0")
    result = build_samples(ROLLOUT, [old, call("b", [1], [3])])
    assert rows(result) == [([1, 3], [0, 1])]
    assert result.counts["calls/other_attempt"] == 1


def test_a_call_of_another_rollout_is_refused():
    with pytest.raises(ValueError, match="belongs to rollout other"):
        build_samples(ROLLOUT, [replace(call("a", [1], [2]), rollout_id="other")])


def test_an_overlong_history_is_cut_at_a_turn_and_counted():
    calls = [call("a", [1], [2]), call("b", [1, 2, 3], [4, 5]), call("c", [1, 2, 3, 4, 5, 6], [7])]
    result = build_samples(ROLLOUT, calls, max_sample_tokens=4)
    assert rows(result) == [([1, 2], [0, 1])]
    assert (result.counts["cut/completions"], result.counts["cut/tokens"]) == (2, 3)
    assert build_samples(ROLLOUT, calls, max_sample_tokens=1).samples == ()


def test_tokens_keep_the_version_that_sampled_them():
    spans = (VersionSpan(4, 0, 1), VersionSpan(5, 1, 3))
    spanned = Completion(token_array([2, 3, 4]), float_array([-1] * 3), "stop", spans)
    known = replace(call("a", [1], [0]), completions=(spanned,))
    unknown = call("b", [9], [8], version_start=None)
    versions = [list(s.policy_versions) for s in build_samples(ROLLOUT, [known, unknown]).samples]
    assert sorted(versions) == [[-1, -1], [-1, 4, 5, 5]]


@st.composite
def conversations(draw) -> list[Call]:
    """Calls that continue one another, branch, restart, or were cut off, over few token ids
    so that equal histories happen."""
    ids = st.lists(st.integers(0, 2), min_size=1, max_size=3)
    histories: list[list[int]] = [[]]
    calls = []
    for number in range(draw(st.integers(1, 9))):
        prompt = draw(st.sampled_from(histories)) + draw(ids)
        answers = draw(st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=1, max_size=2))
        trainable = draw(st.sampled_from([True, True, True, False]))
        reason = None if trainable else "aborted"
        calls.append(
            call(chr(200 + 9 * number), prompt, *answers, trainable=trainable, reason=reason)
        )
        histories += [prompt + answer for answer in answers]
    return calls


def described(result: SampleSet):
    return [
        (s.token_ids.tolist(), s.loss_mask.tolist(), s.rollout_logprobs.tolist())
        for s in result.samples
    ], result.counts


@given(conversations())
@settings(max_examples=150, deadline=None)
def test_every_trainable_sampled_token_is_trained_exactly_once(calls):
    result = build_samples(ROLLOUT, calls)
    trained = sorted(
        (s.token_ids[i], s.rollout_logprobs[i])
        for s in result.samples
        for i in range(len(s.token_ids))
        if s.loss_mask[i]
    )
    sampled = sorted(
        (token, logprob)
        for c in calls
        if c.trainable
        for each in c.completions
        for token, logprob in zip(each.token_ids, each.logprobs, strict=True)
    )
    assert trained == sampled
    for s in result.samples:
        assert len({len(s.token_ids), len(s.loss_mask), len(s.rollout_logprobs)}) == 1
        assert s.loss_mask[-1] == 1
        assert len(s.policy_versions) == len(s.token_ids)


@given(conversations(), st.randoms())
@settings(max_examples=100, deadline=None)
def test_order_and_interleaving_of_calls_change_nothing(calls, random):
    shuffled = list(calls)
    random.shuffle(shuffled)
    renumbered = [replace(c, sequence=i, call_id=f"n{i}") for i, c in enumerate(shuffled)]
    assert described(build_samples(ROLLOUT, calls)) == described(build_samples(ROLLOUT, renumbered))


@given(conversations(), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_a_bound_cuts_whole_completions_and_loses_none_that_fit(calls, bound):
    result = build_samples(ROLLOUT, calls, max_sample_tokens=bound)
    total = sum(len(e.token_ids) for c in calls if c.trainable for e in c.completions)
    assert all(len(s.token_ids) <= bound for s in result.samples)
    assert result.trained_tokens + result.counts.get("cut/tokens", 0) == total
