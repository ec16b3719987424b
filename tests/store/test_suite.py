"""What every store does; runs on each implementation."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from agentlightning.errors import Conflict, NotFound
from agentlightning.store import Store, Transition
from agentlightning.types import (
    Call,
    Completion,
    Event,
    ModelServer,
    Outcome,
    ParentRef,
    RawCall,
    Rollout,
    VersionSpan,
    float_array,
    token_array,
)

RAW = RawCall(b'{"messages":[{"role":"user","content":"hi"}]}', b'{"ok":true}')


async def queue(store: Store, *ids: str, **fields: Any) -> list[Rollout]:
    return await store.add_rollouts([Rollout(one, input={"q": one}, **fields) for one in ids])


async def claim_one(store: Store, owner: str = "c1") -> Rollout:
    (rollout,) = await store.claim(owner, limit=1, lease_seconds=30)
    return rollout


def attempt_of(rollout: Rollout) -> str:
    assert rollout.attempt_id is not None
    return rollout.attempt_id


def call(call_id: str, prompt: list[int], *answers: list[int], **fields: Any) -> Call:
    completions = tuple(
        Completion(token_array(one), float_array([-0.5] * len(one)), "stop") for one in answers
    )
    return Call(call_id, "r1", "a1", token_array(prompt), completions, **fields)


async def test_a_rollout_comes_back_with_all_its_fields(store: Store) -> None:
    wanted = Rollout(
        "a/b:0 ü%",
        input={"q": "ünï", "n": [1, 2.5, None]},
        group_id="g",
        mode="val",
        config={"max_attempts": 3},
        metadata={"data_id": "d1"},
        harness="h",
    )
    (added,) = await store.add_rollouts([wanted])
    assert added == replace(wanted, created_at=added.created_at, updated_at=added.updated_at)
    assert added.created_at == 1000.0
    assert await store.get_rollout("a/b:0 ü%") == added


async def test_an_id_that_exists_is_returned_unchanged(store: Store) -> None:
    (first,) = await queue(store, "r1")
    again = await store.add_rollouts([Rollout("r1", input="other"), Rollout("r2", input="new")])
    assert again[0] == first
    assert [one.rollout_id for one in await store.list_rollouts()] == ["r1", "r2"]


async def test_lists_by_state_and_group_in_pages(store: Store) -> None:
    await queue(store, "r1", "r2", group_id="g1")
    await queue(store, "r3", group_id="g2")
    await store.cancel("r2")
    assert [r.rollout_id for r in await store.list_rollouts(group_ids=["g1"])] == ["r1", "r2"]
    assert [r.rollout_id for r in await store.list_rollouts(states=["queuing"])] == ["r1", "r3"]
    assert [r.rollout_id for r in await store.list_rollouts(after="r1", limit=1)] == ["r2"]


async def test_unknown_rollouts_are_not_found(store: Store) -> None:
    for ask in (
        store.get_rollout("no"),
        store.cancel("no"),
        store.transition("no", Transition(to="failed")),
        store.calls("no"),
        store.attempts("no"),
        store.events("no"),
        store.open_attempt("no", "a1"),
        store.add_event(Event("e", "no", "a", "note", {})),
        store.add_call(replace(call("c", [1]), rollout_id="no"), RAW),
        store.raw_call("no"),
        store.mark_undelivered("no", "x"),
    ):
        with pytest.raises(NotFound, match="no"):
            await ask
    await store.delete_rollout("no")


async def test_a_claim_begins_attempts_in_order(store: Store) -> None:
    await queue(store, "r1", "r2", "r3")
    taken = await store.claim("c1", limit=2, lease_seconds=30)
    assert [one.rollout_id for one in taken] == ["r1", "r2"]
    assert {one.state for one in taken} == {"running"}
    assert taken[0].lease_until == 1030.0
    assert taken[0].owner == "c1"
    assert attempt_of(taken[0]).startswith("a1-")
    assert attempt_of(taken[0]) != attempt_of(taken[1])
    (attempt,) = await store.attempts("r1")
    assert (attempt.attempt_id, attempt.number) == (taken[0].attempt_id, 1)
    assert [r.rollout_id for r in await store.claim("c2", limit=9, lease_seconds=1)] == ["r3"]


async def test_a_lapsed_lease_is_taken_over_until_no_attempt_is_left(
    store: Store, clock: Any
) -> None:
    await queue(store, "r1")
    first = await claim_one(store)
    assert await store.claim("c2", limit=1, lease_seconds=30) == []
    clock.now += 31
    second = await claim_one(store, "c2")
    assert (second.attempt, second.owner) == (2, "c2")
    lost, current = await store.attempts("r1")
    assert lost.attempt_id == first.attempt_id
    assert lost.outcome is not None
    assert lost.outcome.kind == "lost"
    assert current.ended_at is None
    assert await store.renew("c1", ["r1"], lease_seconds=30) == []
    clock.now += 31
    assert await store.claim("c3", limit=1, lease_seconds=30) == []
    ended = await store.get_rollout("r1")
    assert (ended.state, ended.owner, ended.ended_at) == ("failed", None, clock.now)
    assert [one.rollout_id for one in (await store.terminal()).items] == ["r1"]


async def test_a_renewed_lease_is_not_taken_over(store: Store, clock: Any) -> None:
    await queue(store, "r1", "r2")
    await store.claim("c1", limit=2, lease_seconds=30)
    await store.cancel("r2")
    clock.now += 20
    held = await store.renew("c1", ["r1", "r2", "gone"], lease_seconds=30)
    assert [(one.rollout_id, one.lease_until) for one in held] == [("r1", 1050.0)]
    clock.now += 20
    assert await store.claim("c2", limit=2, lease_seconds=30) == []


async def test_a_waiting_claim_wakes_when_a_rollout_is_queued(store: Store) -> None:
    claim = asyncio.create_task(store.claim("c1", limit=1, lease_seconds=30, wait=30))
    await queue(store, "r1")
    assert [one.rollout_id for one in await asyncio.wait_for(claim, 10)] == ["r1"]
    assert await store.claim("c1", limit=1, lease_seconds=30, wait=0.01) == []


async def test_a_rollout_that_was_given_up_is_taken_at_once_and_no_attempt_is_lost(
    store: Store,
) -> None:
    await store.add_rollouts([Rollout("r1", {}, config={"max_attempts": 1})])
    for owner in ("first", "second", "third"):
        [held] = await store.claim(owner, limit=1, lease_seconds=60)
        assert await store.claim("other", limit=1, lease_seconds=60) == []
        await store.renew(owner, [held.rollout_id], lease_seconds=0)
    [held] = await store.claim("last", limit=1, lease_seconds=60)
    assert held.attempt == 4
    with pytest.raises(Conflict, match="1 of 1"):
        await store.retry(
            "r1",
            owner="last",
            attempt_id=held.attempt_id or "",
            outcome=Outcome("lost"),
            lease_seconds=60,
        )
    ended = [each.outcome and each.outcome.kind for each in await store.attempts("r1")]
    assert ended == ["cancelled", "cancelled", "cancelled", None]


async def test_a_retry_begins_the_next_attempt_once(store: Store) -> None:
    await queue(store, "r1")
    first = await claim_one(store)
    lost = Outcome("launch_error", message="no image")

    async def retry(attempt_id: str, owner: str = "c1") -> Rollout:
        return await store.retry(
            "r1", owner=owner, attempt_id=attempt_id, outcome=lost, lease_seconds=60
        )

    with pytest.raises(Conflict, match="held by 'c1'"):
        await retry(attempt_of(first), "c2")
    second = await retry(attempt_of(first))
    assert (second.attempt, second.lease_until, second.owner) == (2, 1060.0, "c1")
    assert await retry(attempt_of(first)) == second
    assert (await store.attempts("r1"))[0].outcome == lost
    with pytest.raises(Conflict, match="no attempt left"):
        await retry(attempt_of(second))


async def test_transitions_end_attempt_and_lease_and_are_final(store: Store) -> None:
    await queue(store, "r1")
    running = await claim_one(store)
    done = Outcome("completed", exit_code=0)
    change = Transition("succeeded", running.attempt_id, "c1", done, k8s_job_name="job")
    with pytest.raises(Conflict):
        await store.transition("r1", replace(change, owner="c2"))
    with pytest.raises(Conflict, match="not the current one"):
        await store.transition("r1", replace(change, attempt_id="old"))
    ended = await store.transition("r1", change)
    assert (ended.state, ended.owner, ended.lease_until) == ("succeeded", None, None)
    assert (ended.outcome, ended.k8s_job_name, ended.ended_at) == (done, "job", 1000.0)
    assert ended.version == running.version + 1
    assert await store.transition("r1", change) == ended
    assert await store.cancel("r1") == ended
    with pytest.raises(Conflict, match="is succeeded"):
        await store.transition("r1", Transition("failed"))
    assert (await store.attempts("r1"))[0].outcome == done


async def test_a_transition_to_no_state_changes_only_what_is_known(store: Store) -> None:
    await queue(store, "r1")
    running = await claim_one(store)
    named = await store.transition("r1", Transition(owner="c1", k8s_job_name="job"))
    assert named == replace(
        running, k8s_job_name="job", version=running.version + 1, updated_at=named.updated_at
    )


async def test_an_opened_attempt_has_no_lease(store: Store, clock: Any) -> None:
    await queue(store, "r1", "r2")
    opened = await store.open_attempt("r1", "1")
    assert (opened.state, opened.attempt_id, opened.owner) == ("running", "1", None)
    assert await store.open_attempt("r1", "1") == opened
    clock.now += 1e6
    assert (await claim_one(store)).rollout_id == "r2"
    with pytest.raises(Conflict, match="is held"):
        await store.open_attempt("r2", "1")
    await store.open_attempt("r1", "2")
    with pytest.raises(Conflict, match="is over"):
        await store.open_attempt("r1", "1")
    await store.transition("r1", Transition("succeeded"))
    with pytest.raises(Conflict, match="has ended"):
        await store.open_attempt("r1", "2")


async def test_terminal_pages_are_in_order_of_completion(store: Store) -> None:
    await queue(store, "r1", "r2", metadata={"data_id": "d"})
    await queue(store, "r3", mode="val")
    await store.cancel("r3")
    await store.cancel("r1")
    page = await store.terminal(limit=1)
    assert [(i.rollout_id, i.data_id, i.is_train) for i in page.items] == [("r3", None, False)]
    assert page.total_terminal == 2
    page = await store.terminal(after=page.next_after)
    assert [(i.rollout_id, i.data_id, i.state) for i in page.items] == [("r1", "d", "cancelled")]
    waiting = asyncio.create_task(store.terminal(after=page.next_after, wait=30))
    await store.delete_rollout("r1")
    await store.cancel("r2")
    late = await asyncio.wait_for(waiting, 10)
    assert [one.rollout_id for one in late.items] == ["r2"]
    empty = await store.terminal(after=late.next_after, wait=0.01)
    assert (empty.items, empty.next_after) == ((), late.next_after)


async def test_a_call_comes_back_with_all_its_fields(store: Store) -> None:
    await queue(store, "r1")
    wanted = call(
        "c/1",
        [1, 2],
        [3, 4],
        dialect="messages",
        requested_model="m",
        model="M",
        upstream="u",
        sampling={"temperature": 0.7},
        version_start=1,
        version_end=2,
        trainable=False,
        reason="cut",
        error="e",
        http_status=200,
        streamed=True,
        prompt_tokens=2,
        completion_tokens=2,
        started_at=1.5,
        first_byte_at=2.5,
        ended_at=3.5,
    )
    answer = Completion(token_array([9]), None, None, (VersionSpan(1, 0, 1),))
    odd = Completion(token_array([8]), float_array([-math.inf]), "length")
    wanted = replace(wanted, completions=(*wanted.completions, answer, odd))
    await store.add_call(wanted, RAW)
    assert await store.calls("r1") == [wanted]
    assert json.loads((await store.raw_call("c/1")).request) == json.loads(RAW.request)


async def test_the_parent_is_the_longest_recorded_history(store: Store) -> None:
    await queue(store, "r1")
    await store.add_call(call("c1", [1], [2], [3]), RAW)
    await store.add_call(call("c2", [1, 3, 4], [5]), RAW)
    await store.add_call(call("c3", [1, 3, 4, 5], []), RAW)
    await store.add_call(replace(call("c4", [1, 3, 4]), attempt_id="a2"), RAW)
    wanted = [
        call("c1", [1], [2], [3]),
        replace(call("c2", [1, 3, 4], [5]), sequence=1, parent=ParentRef("c1", 1)),
        replace(call("c3", [1, 3, 4, 5], []), sequence=2, parent=ParentRef("c2", 0)),
    ]
    assert await store.calls("r1", attempt_id="a1") == wanted
    assert await store.calls("r1", attempt_id="a2") == [
        replace(call("c4", [1, 3, 4]), attempt_id="a2")
    ]


async def test_a_call_whose_id_is_known_stays_as_it_was(store: Store) -> None:
    await queue(store, "r1")
    await store.add_call(call("c1", [1], [2]), RAW)
    await store.add_call(call("c1", [9], [8]), RawCall(b"{}", b"other"))
    await store.add_call(call("c2", [1, 2, 3]), RAW)
    first, second = await store.calls("r1")
    assert first == call("c1", [1], [2])
    assert (second.sequence, second.parent) == (1, ParentRef("c1", 0))
    assert (await store.raw_call("c1")).response == RAW.response


async def test_an_undelivered_call_is_not_trainable(store: Store) -> None:
    await queue(store, "r1")
    await store.add_call(call("c1", [1], [2]), RAW)
    await store.mark_undelivered("c1", "client left")
    (one,) = await store.calls("r1")
    assert (one.status, one.trainable, one.reason) == ("undelivered", False, "client left")


@pytest.mark.parametrize(
    "request_body",
    [
        b'{"model":"m","messages":[{"role":"user","content":"\xc3\xbc"}],"stream":true}',
        b'{"input":[{"type":"message"},{"type":"message"}],"n":1.5}',
        b'{"prompt":[1,2,3]}',
        b'{"messages":[]}',
        b'{"messages":[{"seed":123456789012345678901234567890}]}',
        b'{"messages":[{"content":"\\ud800"}]}',
        b"[1,2]",
    ],
)
async def test_request_bodies_come_back_equal(store: Store, request_body: bytes) -> None:
    await queue(store, "r1")
    await store.add_call(call("c1", [1], [2]), RawCall(request_body, b"answer"))
    raw = await store.raw_call("c1")
    assert json.loads(raw.request) == json.loads(request_body)
    assert raw.response == b"answer"


async def test_bodies_that_are_no_json_are_kept_as_they_are(store: Store) -> None:
    await queue(store, "r1")
    await store.add_call(call("c1", [1], [2]), RawCall(b"\xff\x00{", b"\xfe"))
    assert await store.raw_call("c1") == RawCall(b"\xff\x00{", b"\xfe")


async def test_a_reward_of_the_current_attempt_is_the_rollouts(store: Store) -> None:
    await queue(store, "r1")
    await store.open_attempt("r1", "a1")
    await store.add_event(Event("e1", "r1", "old", "reward", {"value": 5}))
    assert (await store.get_rollout("r1")).reward is None
    added = await store.add_event(Event("e2", "r1", "a1", "reward", {"value": 1}))
    assert (await store.get_rollout("r1")).reward == 1.0
    await store.add_event(Event("e3", "r1", "a1", "note", {"text": "x"}))
    assert await store.events("r1", attempt_id="a1", event_type="reward") == [added]
    assert [one.event_id for one in await store.events("r1")] == ["e1", "e2", "e3"]


async def test_a_used_idempotency_key_adds_nothing(store: Store) -> None:
    await queue(store, "r1")
    first = await store.add_event(Event("e1", "r1", "a", "note", {}), idempotency_key="k")
    again = await store.add_event(Event("e2", "r1", "a", "note", {"x": 1}), idempotency_key="k")
    assert again == first
    assert await store.add_event(Event("e1", "r1", "a", "note", {})) == first
    assert await store.events("r1") == [first]


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "1", None])
async def test_a_reward_is_a_finite_number(store: Store, value: Any) -> None:
    await queue(store, "r1")
    with pytest.raises(ValueError, match="finite number"):
        await store.add_event(Event("e1", "r1", "a", "reward", {"value": value}))
    assert await store.events("r1") == []


async def test_deleting_takes_everything_of_the_rollout(store: Store) -> None:
    await queue(store, "r1", "r2")
    await store.open_attempt("r1", "a1")
    await store.add_call(call("c1", [1], [2]), RAW)
    await store.add_call(replace(call("c2", [1], [2]), rollout_id="r2"), RAW)
    await store.add_event(Event("e1", "r1", "a1", "note", {}))
    await store.delete_rollout("r1")
    with pytest.raises(NotFound):
        await store.raw_call("c1")
    assert json.loads((await store.raw_call("c2")).request) == json.loads(RAW.request)
    await queue(store, "r1")
    assert await store.calls("r1") == []
    assert await store.events("r1") == []
    await store.add_call(call("c3", [1, 2, 3]), RAW)
    assert (await store.calls("r1"))[0].parent is None


async def test_model_servers_are_swapped_by_owner(store: Store) -> None:
    mine, yours = ModelServer("m", "http://a/v1", 3, "me"), ModelServer("m", "http://b/v1")
    await store.set_model_servers([yours])
    await store.set_model_servers([mine, mine], owner="me")
    assert await store.model_servers() == [yours, mine, mine]
    await store.set_model_servers([], owner="me")
    assert await store.model_servers() == [yours]
    await store.set_model_servers([])
    assert await store.model_servers() == []


async def test_settings_hold_any_json(store: Store) -> None:
    assert await store.setting("pause") is None
    await store.set_setting("pause", {"on": True})
    await store.set_setting("pause", {"on": False})
    assert await store.setting("pause") == {"on": False}
