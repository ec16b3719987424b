"""The one way back to the agents: "version v is served at url u"."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path
from typing import Any

import aiohttp
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from agentlightning.errors import ServiceError, TrainerError
from agentlightning.store import Store
from agentlightning.trainer.policy import Policy
from agentlightning.types import ModelServer

log = logging.getLogger(__name__)

_OWNER = "trainer"


class Publisher:
    """Puts the policy's weights on the model server and tells the gateway.

    ``pause`` holds new calls at the gateway and waits for those in flight; between ``pause``
    and ``resume`` weights may change. All waits are bounded by ``patience`` seconds.
    """

    def __init__(
        self,
        *,
        store: Store,
        model: str,
        gateway_url: str,
        admin_key: str,
        server_url: str,
        weights: Path,
        patience: float = 300.0,
    ) -> None:
        self._store = store
        self._model = model
        self._gateway = gateway_url
        self._key = admin_key
        self._server = server_url
        self._weights = weights
        self._patience = patience

    async def announce(self, version: int) -> None:
        """Tells the gateway that the server serves ``version``."""
        server = ModelServer(self._model, f"{self._server}/v1", version=version, owner=_OWNER)
        await self._store.set_model_servers([server], owner=_OWNER)

    async def publish(self, policy: Policy, version: int) -> None:
        """Exports, loads into the model server, announces; keeps no older export."""
        directory = self._weights / f"version-{version}"
        await asyncio.to_thread(_export, policy, directory)
        body = {"path": str(directory.resolve()), "version": version}
        await self._post(f"{self._server}/update_weights", body)
        await self.announce(version)
        for old in self._weights.iterdir():
            if old != directory:
                shutil.rmtree(old, ignore_errors=True)

    async def pause(self) -> None:
        """Holds new calls; returns when none is in flight. TrainerError if that takes too long."""
        await self._post(f"{self._gateway}/proxy/pause", {"reason": "policy update"})
        answer = await self._post(
            f"{self._gateway}/proxy/drain", {"timeout_seconds": self._patience}
        )
        if answer.get("inflight"):
            await self.resume()
            raise TrainerError(
                f"{answer['inflight']} calls were still in flight after {self._patience:.0f} s of "
                "draining; no update was made. Lower sampling.max_tokens, or look at the model "
                "server's log."
            )

    async def resume(self) -> None:
        await self._post(f"{self._gateway}/proxy/resume", {})

    async def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """Posts until it is answered (a restarted service comes back), within the bound."""
        timeout = aiohttp.ClientTimeout(total=self._patience + 30)
        headers = {"Authorization": f"Bearer {self._key}"}
        retrying = AsyncRetrying(
            stop=stop_after_delay(60),
            wait=wait_random_exponential(0.1, max=2),
            retry=retry_if_exception_type(aiohttp.ClientConnectionError),
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    async with (
                        aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                        session.post(url, json=body) as response,
                    ):
                        return await _answer(url, response)
        except aiohttp.ClientError as error:
            raise ServiceError(f"{url} does not answer: {error}") from error
        raise AssertionError("unreachable: the loop returns or raises")


def _export(policy: Policy, directory: Path) -> None:
    """Writes beside the place and renames into it: a model server that is started again takes
    the newest directory, which must be whole."""
    partial = directory.with_name(f".{directory.name}.partial")
    for old in (partial, directory):
        shutil.rmtree(old, ignore_errors=True)
    policy.export(partial)
    partial.rename(directory)


async def _answer(url: str, response: aiohttp.ClientResponse) -> dict[str, Any]:
    if response.status >= 400:
        text = (await response.text())[:500]
        raise TrainerError(f"{url} answered {response.status}: {text}")
    answer = await response.json()
    return answer if isinstance(answer, dict) else {}
