"""``agl train`` from the command line to the checkpoint, and what it survives."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.conftest import Machine, kill, service, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def rows(store: Path, query: str) -> list[tuple[object, ...]]:
    """What any SQLite tool would see."""
    with closing(sqlite3.connect(store)) as db:
        return db.execute(query).fetchall()


def check_books(machine: Machine, *, steps: int) -> None:
    """Every rollout has ended, and each was trained at most once, by the step that says so."""
    store = machine.run / "store.db"
    states = {state for (state,) in rows(store, "SELECT DISTINCT state FROM rollouts")}
    assert states <= {"succeeded", "failed", "cancelled"}
    assert [line["step"] for line in machine.metrics()] == list(range(1, steps + 1))
    progress = json.loads(
        (machine.run / f"checkpoint-{steps}" / "training" / "progress.json").read_text()
    )
    query = (
        "SELECT rollout_id, data ->> 'step' FROM events "
        "JOIN rollouts ON rollouts.seq = events.rollout WHERE event_type = 'trained'"
    )
    trained = rows(store, query)
    assert max(Counter(rollout for rollout, _ in trained).values()) == 1
    assert dict(trained) == progress["consumed"]


def test_a_run_leaves_what_it_promises(machine: Machine) -> None:
    output = machine.agl("train", "it.yaml")
    assert "trainable" in output
    assert "wrote" in output
    check_books(machine, steps=3)
    summary = json.loads((machine.run / "summary.json").read_text())
    assert summary["validation"]["n"] == 4
    assert set(summary["validation"]) == {"before", "after", "difference", "ci95", "n"}
    assert summary["rollouts"] == 24
    assert summary["tokens"]["generated"] > 0
    names = {"config.yaml", "metrics.jsonl", "summary.json", "reward.png", "store.db"}
    assert names <= {path.name for path in machine.run.iterdir()}
    logs = {path.name for path in (machine.run / "logs").iterdir()}
    assert {"gateway.log", "controller.log", "model-server.log"} <= logs
    AutoModelForCausalLM.from_pretrained(machine.run / "checkpoint-3")
    AutoTokenizer.from_pretrained(machine.run / "checkpoint-3")


def test_two_turns_of_a_rollout_are_one_sample_of_exact_tokens(machine: Machine) -> None:
    machine.agl("train", "it.yaml", "trainer.updates=1")
    (line,) = machine.metrics()
    assert line["calls"] == 2 * line["rollouts"]
    assert line["update"]["logprob_difference_max"] < 1e-3
    listed = machine.agl("rollouts", "list")
    assert listed.count("succeeded") >= 8
    calls = rows(
        machine.run / "store.db",
        "SELECT DISTINCT version_start, trainable, status FROM calls WHERE upstream != ''",
    )
    assert set(calls) == {(0, 1, "ok"), (1, 1, "ok")}


@pytest.mark.parametrize("name", ["gateway", "controller", "serve"])
def test_a_killed_service_comes_back_and_the_run_goes_on(machine: Machine, name: str) -> None:
    trainer = machine.start("train", "it.yaml")
    until(lambda: len(machine.metrics()) >= 1)
    kill(service(trainer.pid, name))
    output, _ = trainer.communicate(timeout=200)
    assert trainer.returncode == 0, output
    assert "started again" in output
    check_books(machine, steps=3)


def test_a_killed_trainer_takes_its_services_along_and_resumes(machine: Machine) -> None:
    trainer = machine.start("train", "it.yaml", "trainer.updates=4")
    until(lambda: len(machine.metrics()) >= 2)
    services = psutil.Process(trainer.pid).children(recursive=True)
    kill(trainer)
    trainer.communicate(timeout=30)
    until(lambda: not any(each.is_running() for each in services), seconds=30)
    machine.agl("train", "it.yaml", "trainer.updates=4", "--resume")
    check_books(machine, steps=4)


def test_an_interrupted_run_ends_in_order(machine: Machine) -> None:
    trainer = machine.start("train", "it.yaml")
    until(lambda: len(machine.metrics()) >= 1)
    services = psutil.Process(trainer.pid).children(recursive=True)
    trainer.send_signal(signal.SIGINT)
    output, _ = trainer.communicate(timeout=60)
    assert trainer.returncode == 130
    assert "Traceback" not in output
    until(lambda: not any(each.is_running() for each in services), seconds=20)
    machine.agl("train", "it.yaml", "--resume")
    check_books(machine, steps=3)


def test_a_run_in_progress_is_not_entered_twice(machine: Machine) -> None:
    trainer = machine.start("train", "it.yaml")
    until(lambda: (machine.run / "config.yaml").exists())
    second = machine.start("train", "it.yaml", "--resume")
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 2
    assert "is in use by process" in output
    trainer.send_signal(signal.SIGTERM)
    trainer.communicate(timeout=60)


def test_an_agent_that_cannot_start_is_said_with_its_own_words(machine: Machine) -> None:
    (machine.folder / "agent.py").write_text("import no_such_module_of_anybody\n")
    trainer = machine.start("train", "it.yaml")
    output, _ = trainer.communicate(timeout=120)
    assert trainer.returncode == 1
    assert "none of 4 rollouts called the model" in output
    assert "No module named 'no_such_module_of_anybody'" in output
