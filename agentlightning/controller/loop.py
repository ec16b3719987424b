"""The controller: one loop that holds rollouts and does what :func:`plan` says.

Level-triggered: what happens outside only wakes it; each turn looks at everything it holds.
On SIGTERM or SIGINT it claims no more, ends all its agents, and gives their rollouts up, so
that another controller, or the same one started again, runs them as new attempts; the attempts
that it broke off do not count for ``max_attempts``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentlightning.config import ControllerConfig
from agentlightning.controller import launch
from agentlightning.controller.evaluator import Evaluator, LocalEvaluator
from agentlightning.controller.local import LocalRunner
from agentlightning.controller.plan import (
    Action,
    Evaluate,
    Finish,
    Held,
    Kill,
    Launch,
    Limits,
    Retry,
    deadline,
    plan,
)
from agentlightning.controller.runner import Job, Runner
from agentlightning.controller.spawn import ForkServers
from agentlightning.errors import Conflict, EvaluatorError, LaunchError, NotFound
from agentlightning.store.protocol import Store, Transition
from agentlightning.types import Outcome, Rollout

log = logging.getLogger(__name__)

_CLAIM_WAIT = 5.0
_LONGEST_BACKOFF = 5.0
_CANCELS = 3
_GOODBYE_SECONDS = 5.0
"""How long a controller that ends tries to give its leases up. They end by themselves, so one
whose gateway is gone too does not stay for the store's whole patience."""

Changes = Mapping[str, Any]
"""Fields of a Held that an action changed."""


class Controller:
    """Turns queued rollouts into running agents, and tells the store how each ended."""

    def __init__(
        self, store: Store, runner: Runner, evaluator: Evaluator, config: ControllerConfig
    ) -> None:
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._store = store
        self._runner = runner
        self._evaluator = evaluator
        self._config = config
        self._held: dict[str, Held] = {}
        self._actions: set[asyncio.Task[None]] = set()
        self._evaluations: dict[str, asyncio.Future[None]] = {}
        self._wake = asyncio.Event()
        self._slot_free = asyncio.Event()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Makes :meth:`run` end."""
        self._stopping.set()

    async def run(self) -> None:
        """Until :meth:`stop`; returns when no agent is left and no lease is held."""
        steps = (self._turn, self._claim, self._renew, self._watch)
        loops = [asyncio.create_task(self._repeat(step)) for step in steps]
        try:
            await self._stopping.wait()
        finally:
            await _cancel([*loops, *self._actions])
            await self._runner.close()
            await self._let_go()

    async def _repeat(self, step: Callable[[], Awaitable[None]]) -> None:
        """A border: what fails is logged and tried again after a bounded, growing pause."""
        faults = 0
        while not self._stopping.is_set():
            try:
                await step()
                faults = 0
            except Exception:
                log.exception("controller: fault; trying again")
                pause = min(_LONGEST_BACKOFF, 0.1 * 2.0 ** min(faults, 10))
                faults += 1
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    # --- what wakes the loop

    async def _turn(self) -> None:
        self._wake.clear()
        jobs = await self._runner.list()
        limits = Limits(evaluators=self._config.max_evaluators)
        for action in plan(list(self._held.values()), jobs, limits, time.time()):
            self._begin(action)
        due = deadline(list(self._held.values()), jobs)
        wait = self._config.resync if due is None else due - time.time()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wake.wait(), min(max(wait, 0.01), self._config.resync))

    async def _claim(self) -> None:
        """Takes rollouts as soon as they are queued; the store holds the answer until then, but
        no longer than our leases last: were we stopped (a machine asleep), a claim of ours that
        still waits would take what we just lost, and cost each rollout another attempt."""
        self._slot_free.clear()
        free = self._free_slots()
        if free <= 0:
            await self._slot_free.wait()
            return
        lease = self._config.lease
        claimed = await self._store.claim(
            self.owner, limit=free, lease_seconds=lease, wait=min(_CLAIM_WAIT, lease / 2)
        )
        for rollout in claimed:
            known = self._held.get(rollout.rollout_id)
            if known is None or known.attempt_id != rollout.attempt_id:
                self._held[rollout.rollout_id] = _hold(rollout)
        self._wake.set()

    def _free_slots(self) -> int:
        """Agents that may start now. A rollout under evaluation holds no agent; one that
        waits for an evaluator keeps its slot, so that slow evaluators slow the agents down."""
        evaluating = sum(held.busy == "evaluate" for held in self._held.values())
        return self._config.max_running + evaluating - len(self._held)

    async def _renew(self) -> None:
        """Renews the leases; what is no longer ours was cancelled, deleted or taken over."""
        await asyncio.sleep(min(self._config.lease / 4, self._config.resync))
        asked = {id_: held.attempt_id for id_, held in self._held.items() if not held.gone}
        if not asked:
            return
        kept = await self._store.renew(self.owner, list(asked), lease_seconds=self._config.lease)
        ours = {(rollout.rollout_id, rollout.attempt_id) for rollout in kept}
        for rollout_id, attempt_id in asked.items():
            held = self._held.get(rollout_id)
            if held and held.attempt_id == attempt_id and (rollout_id, attempt_id) not in ours:
                self._held[rollout_id] = replace(held, gone=True)
                if attempt_id in self._evaluations:
                    self._evaluations[attempt_id].cancel()
                self._wake.set()

    async def _watch(self) -> None:
        await self._runner.wait_for_change(self._config.resync)
        self._wake.set()

    # --- actions

    def _begin(self, action: Action) -> None:
        """Starts an action beside the loop; its rollout is busy until it is done."""
        if action.held is not None:
            busy = type(action).__name__.lower()
            self._held[action.held.rollout.rollout_id] = replace(action.held, busy=busy)
        task = asyncio.create_task(self._complete(action))
        self._actions.add(task)
        task.add_done_callback(self._actions.discard)
        if isinstance(action, Evaluate):
            self._slot_free.set()

    async def _complete(self, action: Action) -> None:
        """Does an action. Whatever failed is decided anew by the next turn, after a pause."""
        changes: Changes | None
        try:
            changes = await self._do(action)
        except (Conflict, NotFound) as error:
            log.info("controller: %s: no longer ours: %s", _name(action), error)
            changes = {"gone": True}
        except Exception:
            log.exception("controller: %s failed; trying again", _name(action))
            changes = {"not_before": time.time() + random.uniform(0.5, 1.5)}
        if action.held is not None:
            self._update(action.held.rollout, changes)

    def _update(self, rollout: Rollout, changes: Changes | None) -> None:
        held = self._held.get(rollout.rollout_id)
        if held is not None and held.attempt_id == rollout.attempt_id:
            del self._held[rollout.rollout_id]
            if changes is not None:
                self._held[rollout.rollout_id] = replace(held, **{"busy": None, **changes})
        self._slot_free.set()
        self._wake.set()

    async def _do(self, action: Action) -> Changes | None:
        """The changes to what is held, or None to hold it no longer."""
        if isinstance(action, Launch):
            return await self._launch(action.held)
        if isinstance(action, Kill):
            await self._runner.kill(action.job, grace_seconds=action.grace)
            return {"stopping": action.reason}
        if isinstance(action, Evaluate):
            return await self._evaluate(action)
        if isinstance(action, Retry):
            return await self._retry(action)
        if isinstance(action, Finish):
            await self._finish(action)
        else:
            await self._runner.remove(action.job)
        return None

    async def _launch(self, held: Held) -> Changes:
        try:
            await self._runner.launch(held.rollout)
        except LaunchError as error:
            return {"launch_error": str(error)}
        return {}

    async def _evaluate(self, action: Evaluate) -> Changes:
        held = action.held
        work = self._evaluator.evaluate(held.rollout, action.job, action.outcome)
        evaluation = self._evaluations[held.attempt_id] = asyncio.ensure_future(work)
        try:
            await evaluation
        except asyncio.CancelledError:
            if not self._is_gone(held):
                raise
            return {}
        except EvaluatorError as error:
            log.warning("controller: %s: %s", _name(action), error)
            return {"evaluator_faults": (*held.evaluator_faults, str(error))}
        finally:
            del self._evaluations[held.attempt_id]
        return {"evaluated": True}

    def _is_gone(self, held: Held) -> bool:
        now = self._held.get(held.rollout.rollout_id)
        return now is not None and now.attempt_id == held.attempt_id and now.gone

    async def _retry(self, action: Retry) -> Changes | None:
        held = action.held
        try:
            rollout = await self._store.retry(
                held.rollout.rollout_id,
                owner=self.owner,
                attempt_id=held.attempt_id,
                outcome=action.outcome,
                lease_seconds=self._config.lease,
            )
        except Conflict:  # no attempt is left, or it is not ours: the transition tells
            await self._finish(Finish(held, action.job, "failed", action.outcome))
            return None
        fresh = _hold(rollout)
        return {name: getattr(fresh, name) for name in Held.__dataclass_fields__}

    async def _finish(self, action: Finish) -> None:
        held, job = action.held, action.job
        change = Transition(
            to=action.state,
            attempt_id=held.attempt_id,
            owner=self.owner,
            outcome=action.outcome,
            error_message=await self._message(job, action.outcome),
        )
        await self._store.transition(held.rollout.rollout_id, change)
        if job is not None:
            await self._runner.remove(replace(job, outcome=action.outcome))

    async def _message(self, job: Job | None, outcome: Outcome) -> str | None:
        """What a person wants to read first: the agent's own last words, where it failed."""
        if outcome.kind != "agent_error" or job is None:
            return outcome.message
        code = outcome.exit_code or 0
        ended = f"the agent ended by signal {-code}" if code < 0 else f"exit code {code}"
        return await self._runner.output_tail(job) or f"{ended}, nothing on standard error"

    async def _let_go(self) -> None:
        held = [id_ for id_, each in self._held.items() if not each.gone]
        if not held:
            return
        log.info("controller: stopped; %d rollouts are left for the next controller", len(held))
        try:
            giving_up = self._store.renew(self.owner, held, lease_seconds=0)
            await asyncio.wait_for(giving_up, _GOODBYE_SECONDS)
        except asyncio.TimeoutError:
            log.warning("controller: the gateway does not answer: leases end by themselves")
        except Exception:
            log.exception("controller: leases not given up; they end by themselves")


async def run(
    config: ControllerConfig, *, store: Store, gateway_url: str, admin_key: str, root: Path
) -> None:
    """Runs local agents until SIGTERM or SIGINT; their files go below ``root``."""
    await asyncio.to_thread(root.mkdir, parents=True, exist_ok=True)
    servers = ForkServers(root / "forkserver.log")
    runner = LocalRunner(root, launch.Gateway(gateway_url, admin_key), servers)
    controller = Controller(store, runner, LocalEvaluator(store, root, servers), config)
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, controller.stop)
    print(f"controller running local agents for {gateway_url}", flush=True)
    await controller.run()


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels, more than once: asyncio.wait_for may swallow one (Python < 3.12)."""
    left = set(tasks)
    for _ in range(_CANCELS):
        for task in left:
            task.cancel()
        if left:
            _, left = await asyncio.wait(left, timeout=1)


def _hold(rollout: Rollout) -> Held:
    """What the launch spec says of a rollout; a spec that is wrong fails it at once."""
    try:
        config = launch.parse(rollout)
        local = launch.local_launch(config)
    except LaunchError as error:
        return Held(rollout, time_limit=0.0, grace=0.0, launch_error=str(error))
    return Held(
        rollout,
        time_limit=launch.time_limit(config),
        grace=local.grace,
        evaluate=local.evaluate is not None and not local.evaluate.event,
    )


def _name(action: Action) -> str:
    who = action.held.rollout if action.held is not None else action.job
    return f"{type(action).__name__.lower()} of rollout {who.rollout_id} ({who.attempt_id})"
