"""The loop against a real store; agents, policy and publisher are fakes at our own seams."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agentlightning.config import Config, load_config
from agentlightning.errors import TrainerError
from agentlightning.store import Store, open_store
from agentlightning.trainer.loop import Trainer
from agentlightning.trainer.policy import TrainingRow
from agentlightning.trainer.run_folder import RunFolder
from agentlightning.types import Call, Outcome, Rollout
from tests.fakes.policy import RecordingPolicy
from tests.fakes.world import FakePublisher, Notes, agents, one_call, run_one

CONFIG = """
model: none
agent: {python: agent.py}
evaluate: {event: true}
tasks: {train: TRAIN, val: VAL}
validation: {tasks: 2}
trainer: {updates: 3, groups_per_update: 2, rollouts_per_group: 4, checkpoint_every: 2}
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    train, val, path = (tmp_path / name for name in ("train.jsonl", "val.jsonl", "run.yaml"))
    train.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(5)))
    val.write_text("".join(json.dumps({"v": n}) + "\n" for n in range(2)))
    path.write_text(CONFIG.replace("TRAIN", str(train)).replace("VAL", str(val)))
    return load_config(path)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.acquire()
    folder.release()
    return folder


@pytest.fixture
async def store(folder: RunFolder) -> AsyncIterator[Store]:
    store = await open_store(folder.store_url)
    yield store
    await store.close()


class Setting:
    """A trainer with everything around it that is not under test."""

    def __init__(
        self, config: Config, folder: RunFolder, store: Store, policy: RecordingPolicy | None = None
    ) -> None:
        self.policy = policy or RecordingPolicy()
        self.publisher = FakePublisher(store)
        self.notes = Notes()
        self.trainer = Trainer(
            config,
            folder=folder,
            store=store,
            policy=self.policy,
            publisher=self.publisher,  # type: ignore[arg-type]
            model="policy",
            observer=self.notes,
        )


def mixed(rollout: Rollout) -> float:
    """Half of each group succeeds."""
    return float(rollout.rollout_id.split("-")[1] in ("0", "1"))


async def test_a_run_from_start_to_end(config: Config, folder: RunFolder, store: Store) -> None:
    setting = Setting(config, folder, store)
    async with agents(store, mixed):
        result = await setting.trainer.run()
    progress = result.progress
    assert (progress.step, progress.policy_version, progress.rollouts) == (3, 3, 24)
    assert [len(ids) for ids in setting.policy.trained] == [8, 8, 8]
    assert [line["reward"] for line in setting.notes.steps] == [0.5, 0.5, 0.5]
    assert [line["staleness_max"] for line in folder.metrics()] == [0, 0, 0]
    assert result.before is not None
    assert result.before.reward.n == 2
    assert (folder.path / "checkpoint-3" / "weights.json").exists()


async def test_calls_wait_while_weights_change(
    config: Config, folder: RunFolder, store: Store
) -> None:
    setting = Setting(config, folder, store)
    async with agents(store, mixed):
        await setting.trainer.run()
    step = ["pause", "announce {}", "resume"]
    expected = ["announce 0", "resume", *(s.format(v) for v in (1, 2, 3) for s in step)]
    assert setting.publisher.log == expected


async def test_the_store_says_once_which_step_consumed_a_rollout(
    config: Config, folder: RunFolder, store: Store
) -> None:
    setting = Setting(config, folder, store)
    async with agents(store, mixed):
        await setting.trainer.run()
    for step, ids in enumerate(setting.policy.trained, start=1):
        for rollout_id in ids:
            events = await store.events(rollout_id, event_type="trained")
            assert [event.data for event in events] == [{"step": step}]


async def test_equal_rewards_make_no_update_and_an_alarm(
    config: Config, folder: RunFolder, store: Store
) -> None:
    setting = Setting(config, folder, store)
    async with agents(store, lambda _: 1.0):
        result = await setting.trainer.run()
    assert setting.policy.trained == []
    assert result.progress.policy_version == 0
    assert [line["event"] for line in folder.metrics()] == ["no_signal"] * 3
    assert any("no signal" in text for text in setting.notes.warnings)


async def test_rollouts_without_reward_are_left_out_by_reason(
    config: Config, folder: RunFolder, store: Store
) -> None:
    setting = Setting(config, folder, store)

    def reward(rollout: Rollout) -> float | None:
        return None if rollout.rollout_id.endswith("-0") else mixed(rollout)

    async with agents(store, reward):
        result = await setting.trainer.run()
    assert result.excluded == {"no_reward": 6}
    assert [len(ids) for ids in setting.policy.trained] == [6, 6, 6]


async def test_an_agent_that_never_calls_ends_the_run_at_once(
    config: Config, folder: RunFolder, store: Store
) -> None:
    setting = Setting(config, folder, store)
    async with agents(store, mixed, calls=False):
        with pytest.raises(TrainerError, match="none of 2 rollouts called the model"):
            await setting.trainer.run()


async def test_an_evaluator_that_always_fails_ends_the_run_at_once(
    config: Config, folder: RunFolder, store: Store
) -> None:
    setting = Setting(config, folder, store)
    broken = Outcome("evaluator_error", message="Traceback\nValueError: verifier broke\n")
    running = asyncio.create_task(setting.trainer.run())
    claimed = await store.claim("world", limit=100, lease_seconds=60, wait=5)
    for rollout in claimed:
        await run_one(store, rollout, None, outcome=broken)
    with pytest.raises(TrainerError, match=r"failed on all 2 .*ValueError: verifier broke"):
        await running


async def test_waiting_for_a_controller_is_bounded(
    config: Config, folder: RunFolder, store: Store
) -> None:
    trainer = config.trainer.model_copy(update={"rollout_wait": 0.01})
    setting = Setting(config.model_copy(update={"trainer": trainer}), folder, store)
    with pytest.raises(TrainerError, match=r"2 queuing\. Is a controller running"):
        await setting.trainer.run()


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the loop sees it as an error to deal with."""


class DyingPolicy(RecordingPolicy):
    """Dies in the update with number ``at`` (from 1), before or after the optimizer step."""

    def __init__(self, at: int, *, after: bool) -> None:
        super().__init__()
        self._at = at
        self._after = after

    def update(self, rows: Sequence[TrainingRow]) -> dict[str, float]:
        dies = len(self.trained) + 1 == self._at
        if dies and not self._after:
            raise Killed
        super().update(rows)
        if dies:
            raise Killed
        return {"loss": 0.0}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3])
async def test_a_killed_run_goes_on_and_trains_nothing_twice(
    config: Config, folder: RunFolder, store: Store, at: int, after: bool
) -> None:
    async with agents(store, mixed):
        with pytest.raises(Killed):
            await Setting(config, folder, store, DyingPolicy(at, after=after)).trainer.run()
        resumed = Setting(config, folder, store)
        result = await resumed.trainer.run(resume=True)
    assert result.progress.step == 3
    assert [line["step"] for line in folder.metrics()] == [1, 2, 3]
    trained = Counter(i for update in resumed.policy.trained for i in update)
    assert len(trained) == 24
    assert set(trained.values()) == {1}
    assert set(result.progress.consumed) == set(trained)


async def test_rollouts_of_lost_weights_are_never_trained(
    config: Config, folder: RunFolder, store: Store
) -> None:
    """Checkpoint at 2 of 4; dies in update 4, whose rollouts saw version 3: it is lost."""
    longer = config.trainer.model_copy(update={"updates": 4, "checkpoint_every": 2})
    config = config.model_copy(update={"trainer": longer})
    async with agents(store, mixed):
        with pytest.raises(Killed):
            await Setting(config, folder, store, DyingPolicy(4, after=False)).trainer.run()
        resumed = Setting(config, folder, store)
        result = await resumed.trainer.run(resume=True)
    lost = await store.setting("lost_rollouts")
    assert len(lost) == 8
    assert not set(lost) & set(result.progress.consumed)
    assert len(result.progress.consumed) == 32
    assert json.loads(folder.lost_metrics_file.read_text())["step"] == 3
    assert any("resumed after step 2" in text for text in resumed.notes.warnings)


async def test_validation_before_is_read_not_run_again_after_a_restart(
    config: Config, folder: RunFolder, store: Store
) -> None:
    async with agents(store, lambda r: 0.0 if r.mode == "val" else mixed(r)):
        with pytest.raises(Killed):
            await Setting(config, folder, store, DyingPolicy(3, after=False)).trainer.run()
    resumed = Setting(config, folder, store)
    async with agents(store, lambda r: 1.0 if r.mode == "val" else mixed(r)):
        result = await resumed.trainer.run(resume=True)
    assert result.before is not None
    assert result.after is not None
    assert result.after.difference(result.before).mean == 1.0


async def test_a_deleted_rollout_is_left_out(
    config: Config, folder: RunFolder, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.trainer.collect._POLL_SECONDS", 0.01)
    setting = Setting(config, folder, store)
    task = asyncio.create_task(setting.trainer.run())
    first, second = await store.claim("world", limit=2, lease_seconds=60, wait=10)
    await store.delete_rollout(first.rollout_id)
    await run_one(store, second, 1.0)
    async with agents(store, mixed):
        result = await task
    assert result.before is not None
    assert result.before.reward.n == 1


async def test_calls_that_cannot_be_trained_are_said_at_once(
    config: Config, folder: RunFolder, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def of_another_model(store: Store, rollout: Rollout) -> Call:
        return replace(await one_call(store, rollout), trainable=False, reason="other_model")

    monkeypatch.setattr("tests.fakes.world.one_call", of_another_model)
    setting = Setting(config, folder, store)
    async with agents(store, mixed):
        with pytest.raises(TrainerError, match="no rollout of the last 3 steps could be trained"):
            await setting.trainer.run()
    assert "no call of step 1 can be trained: 8 other_model" in setting.notes.warnings[0]


async def test_a_consumed_rollout_that_was_deleted_does_not_stop_the_run(
    config: Config, folder: RunFolder, store: Store
) -> None:
    setting = Setting(config, folder, store)
    async with agents(store, mixed):
        progress = (await setting.trainer.run()).progress
        gone, *_ = progress.consumed
        await store.delete_rollout(gone)
        resumed = Setting(config, folder, store)
        result = await resumed.trainer.run(resume=True)
    assert result.progress.consumed == progress.consumed


async def test_a_run_that_failed_on_a_broken_agent_resumes_once_it_is_mended(
    config: Config, folder: RunFolder, store: Store
) -> None:
    async with agents(store, mixed, calls=False):
        with pytest.raises(TrainerError, match="called the model"):
            await Setting(config, folder, store).trainer.run()
    async with agents(store, mixed):
        result = await Setting(config, folder, store).trainer.run(resume=True)
    assert result.progress.step == 3
    assert result.before is not None
    assert result.before.reward.n == 2
