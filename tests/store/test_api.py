"""The ``/api`` that agents, hooks and foreign clients see, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from yarl import URL

from agentlightning import credentials
from agentlightning.errors import CredentialError, StoreUnavailable
from agentlightning.store import HttpStore, SqliteStore
from agentlightning.types import Call, Completion, RawCall, Rollout, float_array, token_array

from .conftest import KEY, serving


class Client:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def __call__(
        self,
        method: str,
        path: str | URL,
        body: Any = None,
        *,
        key: str | None = KEY,
        **options: Any,
    ) -> tuple[int, Any]:
        headers = {**({"x-api-key": key} if key else {}), **options.pop("headers", {})}
        if body is not None:
            options["json"] = body
        async with self.session.request(method, path, headers=headers, **options) as answer:
            return answer.status, await answer.json() if answer.content_length else None


@pytest.fixture
async def ask(api_url: str) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(api_url) as session:
        yield Client(session)


EVENTS = "/api/rollouts/r1/attempt/a1/events"


async def test_rollouts_have_the_public_shape(ask: Client) -> None:
    status, (made,) = await ask("POST", "/api/rollouts", [{"input": {"q": 1}, "is_train": False}])
    assert status == 201
    assert made["rollout_id"]
    assert (made["is_train"], made["config"], made["metadata"]) == (False, {}, {})
    assert made["status"]["state"] == "queuing"
    status, (listed,) = await ask("GET", "/api/rollouts?state_in=queuing&state_in=running")
    assert listed == made
    status, one = await ask("GET", f"/api/rollouts/{made['rollout_id']}")
    assert one == {"rollout": made, "attempts": []}


async def test_a_foreign_controller_runs_a_rollout_by_patches(ask: Client) -> None:
    await ask("POST", "/api/rollouts", [{"input": 1, "rollout_id": "r1"}])
    path = "/api/rollouts/r1"
    running = {"state": "running", "last_attempt_id": "1", "k8s_job_name": "job"}
    status, got = await ask("PATCH", path, {"status": running})
    assert (status, got["status"]["last_attempt_id"]) == (200, "1")
    assert got["status"]["k8s_job_name"] == "job"
    for _ in range(2):
        status, got = await ask("PATCH", path, {"status": {"state": "succeeded"}})
        assert (status, got["status"]["state"]) == (200, "succeeded")
    status, got = await ask("PATCH", path, {"status": {"state": "failed"}})
    assert status == 409
    assert "is succeeded" in got["detail"]
    status, page = await ask("GET", "/api/rollouts/terminal?after=0&wait=5")
    assert page["items"][0]["rollout_id"] == "r1"
    assert (await ask("DELETE", path))[0] == 204
    assert (await ask("GET", path))[0] == 404


async def test_credentials_allow_one_thing(ask: Client) -> None:
    await ask("POST", "/api/rollouts", [{"input": 1, "rollout_id": "r1"}])
    judge = credentials.sign(KEY, "r1", "a1", scopes=["reward"], seconds=60)
    caller = credentials.sign(KEY, "r1", "a1", scopes=["call"], seconds=60)
    reward = {"event_type": "reward", "data": {"value": 1}}
    assert (await ask("POST", EVENTS, reward, key=judge))[0] == 409
    await ask("POST", "/api/rollouts/r1/attempt/a1/open")
    assert (await ask("POST", EVENTS, reward, key=judge))[0] == 201
    status, body = await ask("POST", EVENTS, reward, key=caller)
    assert status == 403
    assert "'reward'" in body["detail"]
    assert (await ask("POST", EVENTS.replace("a1", "a2"), reward, key=judge))[0] == 403
    status, body = await ask("GET", "/api/rollouts/r1/events", key=judge)
    assert status == 403
    assert "admin" in body["detail"]
    for key in (None, "wrong"):
        assert (await ask("GET", "/api/rollouts", key=key))[0] == 401
        assert (await ask("POST", EVENTS, reward, key=key))[0] == 401


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
async def test_an_agent_posts_no_event_after_its_end_and_no_large_one(ask: Client) -> None:
    await ask("POST", "/api/rollouts", [{"input": 1, "rollout_id": "r1"}])
    await ask("POST", "/api/rollouts/r1/attempt/a1/open")
    judge = credentials.sign(KEY, "r1", "a1", scopes=["reward"], seconds=60)
    large = {"event_type": "note", "data": {"text": "x" * 2**20}}
    assert (await ask("POST", EVENTS, large, key=judge))[0] == 413
    assert (await ask("POST", EVENTS, large))[0] == 201
    await ask("PATCH", "/api/rollouts/r1", {"status": {"state": "succeeded"}})
    reward = {"event_type": "reward", "data": {"value": 1}}
    status, body = await ask("POST", EVENTS, reward, key=judge)
    assert status == 409
    assert "is over" in body["detail"]
    assert (await ask("POST", EVENTS, reward))[0] == 201


@pytest.mark.parametrize("value", ["NaN", "Infinity", "true", '"1"', "null", "1e999"])
async def test_a_reward_that_is_no_finite_number_is_refused(ask: Client, value: str) -> None:
    await ask("POST", "/api/rollouts", [{"input": 1, "rollout_id": "r1"}])
    body = f'{{"event_type":"reward","data":{{"value":{value}}}}}'
    status, got = await ask("POST", EVENTS, data=body)
    assert status == 422
    assert got["detail"]


async def test_bad_bodies_and_queries_are_422(ask: Client) -> None:
    for method, path, body in (
        ("POST", "/api/rollouts", {"input": 1}),
        ("POST", "/api/rollouts", [{}]),
        ("POST", "/api/rollouts", [{"input": 1, "config": {"timeout_seconds": -1}}]),
        ("PATCH", "/api/rollouts/r1", {"status": {"state": "done"}}),
        ("GET", "/api/rollouts?state_in=done", None),
        ("GET", "/api/rollouts/terminal?after=x", None),
        ("POST", "/api/claim", {"owner": "c"}),
    ):
        status, got = await ask(method, path, body)
        assert (status, list(got)) == (422, ["detail"]), path


async def test_an_idempotency_key_posts_one_event(ask: Client) -> None:
    await ask("POST", "/api/rollouts", [{"input": 1, "rollout_id": "r1"}])
    note = {"event_type": "note", "data": {}}
    posts = [await ask("POST", EVENTS, note, headers={"idempotency-key": "k"}) for _ in range(2)]
    assert posts[0] == posts[1]


async def test_triplets_and_samples_show_what_is_trained(ask: Client, sqlite: SqliteStore) -> None:
    await sqlite.add_rollouts([Rollout("a/b:0", {})])
    await sqlite.open_attempt("a/b:0", "1")
    answer = Completion(token_array([3]), float_array([-0.5]), "stop")
    recorded = Call("c", "a/b:0", "1", token_array([1, 2]), (answer,), upstream="http://u/v1")
    await sqlite.add_call(recorded, RawCall(b"{}", b"{}"))
    path = "/api/rollouts/a%2Fb%3A0"
    url = URL(f"{path}/events?format=triplet", encoded=True)
    _, (triplet,) = await ask("GET", url)
    assert triplet["prompt_token_ids"] == [1, 2]
    assert triplet["response_token_ids"] == [3]
    assert triplet["response_log_probs"] == [-0.5]
    assert triplet["server"] == "http://u/v1"
    _, got = await ask("GET", URL(f"{path}/samples", encoded=True))
    assert got["samples"][0]["loss_mask"] == [0, 0, 1]
    assert got["counts"]["calls"] == 1


async def test_models_are_registered_by_owner(ask: Client) -> None:
    def server(owner: str | None) -> dict[str, Any]:
        return {"model": "m", "endpoint": "http://u/v1", "version": 1, "owner": owner}

    await ask("POST", "/api/models", [server("a")])
    _, both = await ask("POST", "/api/models", [server("b")])
    assert both == [server("a"), server("b")]
    assert (await ask("DELETE", "/api/models?owner=a"))[0] == 204
    assert (await ask("GET", "/api/models"))[1] == [server("b")]


async def test_a_wrong_key_is_a_credential_error(api_url: str) -> None:
    store = HttpStore(api_url, "wrong")
    with pytest.raises(CredentialError):
        await store.model_servers()
    await store.close()


async def test_a_gateway_that_is_away_for_a_moment_is_asked_again() -> None:
    statuses = [503, 502, 200]

    async def answer(_: Any) -> PlainTextResponse:
        return PlainTextResponse("[]", statuses.pop(0))

    async with serving(Starlette(routes=[Route("/api/models", answer)])) as url:
        store = HttpStore(url)
        assert await store.model_servers() == []
        assert statuses == []
        await store.close()


async def test_a_gateway_that_stays_away_is_unavailable() -> None:
    store = HttpStore("http://127.0.0.1:1", patience=0.2)
    with pytest.raises(StoreUnavailable, match="Is the gateway running"):
        await store.model_servers()
    await store.close()


async def test_a_claim_whose_client_is_gone_takes_nothing(http: HttpStore, api_url: str) -> None:
    stopped = HttpStore(api_url, KEY)
    claim = asyncio.create_task(stopped.claim("stopped", limit=1, lease_seconds=60, wait=30))
    for _ in range(3):  # by then the claim has reached the store
        await http.list_rollouts()
    claim.cancel()
    await asyncio.gather(claim, return_exceptions=True)
    await stopped.close()
    for _ in range(3):
        await http.list_rollouts()
    await http.add_rollouts([Rollout("r1", {})])
    [taken] = await http.claim("alive", limit=1, lease_seconds=60, wait=10)
    assert taken.owner == "alive"
