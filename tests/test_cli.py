"""The command line against a real store file and a scripted model server."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentlightning import cli
from agentlightning.cli.commands import sampling, split
from agentlightning.cli.rollouts import describe, diagnose
from agentlightning.cli.settings import every_setting
from agentlightning.store import Store, open_store
from agentlightning.store.protocol import Transition
from agentlightning.types import (
    Attempt,
    Call,
    Completion,
    Event,
    Outcome,
    RawCall,
    Rollout,
    float_array,
    token_array,
)
from tests.fakes.model_server import Reply, ScriptedModelServer

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Ended:
    returncode: object
    stdout: str
    stderr: str


def agl(*arguments: object, cwd: Path = ROOT) -> Ended:
    """A command line in this process, as in a pipe."""
    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    os.chdir(cwd)
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            cli.run(list(map(str, arguments)))
    finally:
        os.chdir(before)
    return Ended(ended.value.code, out.getvalue(), err.getvalue())


def call(call_id: str, rollout_id: str, prompt: list[int], *, trainable: bool = True) -> Call:
    completion = Completion(token_array([7, 8]), float_array([-0.5, -0.25]), "stop")
    reason = None if trainable else "ids_usage_mismatch"
    ids = token_array(prompt)
    return Call(
        call_id, rollout_id, "a1", ids, (completion,), trainable=trainable, reason=reason,
        requested_model="policy", version_start=3, version_end=3,
    )  # fmt: skip


async def end(store: Store, rollout_id: str, outcome: Outcome) -> None:
    state = "succeeded" if outcome.kind == "completed" else "failed"
    await store.transition(rollout_id, Transition(to=state, attempt_id="a1", outcome=outcome))


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    """A run folder with one rollout that succeeded, one that failed and one that waits."""
    folder = tmp_path / "runs" / "demo-1"
    logs = folder / "agents" / "77aa-failed" / "a1"
    logs.mkdir(parents=True)
    (logs / "stderr.log").write_text("Traceback\nModuleNotFoundError: No module named 'sympy'\n")
    (logs / "stdout.log").write_text("hello\n")
    store = await open_store(f"sqlite:///{folder / 'store.db'}")
    names = ("3f9c-good", "77aa-failed", "3f9d-waits")
    await store.add_rollouts([Rollout(name, {"q": "2+2"}, group_id="g1") for name in names])
    for name in names[:2]:
        await store.open_attempt(name, "a1")
    for each in (
        call("c1", names[0], [1, 2]),
        call("c2", names[0], [1, 2, 7, 8, 5]),
        call("c3", names[0], [9], trainable=False),
    ):
        await store.add_call(each, RawCall(b"{}", b"{}"))
    await store.add_event(Event("e1", names[0], "a1", "reward", {"value": 1.0, "reason": "right"}))
    await end(store, names[0], Outcome("completed", exit_code=0))
    await end(store, names[1], Outcome("agent_error", exit_code=1))
    await store.close()
    return folder


def test_list_reads_the_newest_run_and_keeps_ids_whole(run: Path) -> None:
    shown = agl("rollouts", "list", cwd=run.parent.parent)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        "rollout", "3f9c-good", "77aa-failed", "3f9d-waits",
    ]  # fmt: skip
    assert "\x1b" not in shown.stdout
    failed = agl("rollouts", "list", "--state", "failed", "--run", run).stdout.splitlines()
    assert len(failed) == 2
    assert "agent exited 1" in failed[1]


def test_show_says_why_it_failed_and_what_helps(run: Path) -> None:
    shown = agl("rollouts", "show", "77", "--run", run).stdout
    first, *rest = shown.splitlines()
    assert first.startswith("rollout 77aa-failed  failed  attempt 1 of 2")
    assert first.endswith("agent exited 1 before its first call")
    assert "    ModuleNotFoundError: No module named 'sympy'" in rest
    assert rest[-1].startswith("  fix: install it where the agent runs")


def test_show_of_a_good_one_tells_reward_and_untrainable_calls(run: Path) -> None:
    shown = agl("rollouts", "show", "3f9c", "--store", run / "store.db").stdout
    assert "calls     3, of them trainable 2" in shown
    assert "not trainable: ids_usage_mismatch" in shown
    assert "reward    1   reason: right" in shown


def test_ids_must_be_unique_and_known(run: Path) -> None:
    many = agl("rollouts", "show", "3f9", "--run", run)
    assert many.returncode == 1
    assert many.stderr.count("\n") == 1
    assert "begins 2 rollout ids (3f9c-good, 3f9d-waits" in many.stderr
    assert "there is no rollout 'zz'" in agl("calls", "zz", "--run", run).stderr


def test_logs(run: Path) -> None:
    both = agl("rollouts", "logs", "77aa", "--run", run).stdout
    assert "hello" in both
    assert "sympy" in both
    only = agl("rollouts", "logs", "77aa", "--stream", "stdout", "--run", run).stdout
    assert only == "hello\n"
    none = agl("rollouts", "logs", "3f9c", "--run", run)
    assert none.returncode == 1
    assert "no logs of rollout 3f9c-good here" in none.stderr


def test_cancel(run: Path) -> None:
    assert agl("rollouts", "cancel", "3f9d", "--run", run).stdout == "3f9d-waits  cancelled\n"
    assert "already" in agl("rollouts", "cancel", "3f9d", "--run", run).stdout


def test_calls_and_samples(run: Path) -> None:
    calls = agl("calls", "3f9c", "--run", run).stdout.splitlines()
    assert [line.split()[0] for line in calls[1:]] == ["c1", "c2", "c3"]
    assert calls[3].rstrip().endswith("no: ids_usage_mismatch")
    samples = agl("samples", "3f9c", "--ids", "--run", run).stdout
    assert "0 token_ids [1, 2, 7, 8, 5, 7, 8]" in samples
    assert "0 loss_mask [0, 0, 1, 1, 0, 1, 1]" in samples
    assert "untrainable/ids_usage_mismatch 1" in samples


def test_export_as_json_lines_and_parquet(run: Path, tmp_path: Path) -> None:
    done = agl("export", run, "--format", "jsonl", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()]
    assert [row["loss_mask"] for row in rows] == [[0, 0, 1, 1, 0, 1, 1]]
    assert agl("export", run / "store.db", "--out", tmp_path / "out").returncode == 0
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(tmp_path / "out/samples.parquet").to_pylist()
    assert [row["token_ids"] for row in table] == [row["token_ids"] for row in rows]
    assert parquet.read_table(tmp_path / "out/calls.parquet").num_rows == 3


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (("rollouts", "list", "--run", "nowhere"), 2, "nowhere holds no store.db"),
        (("rollouts", "list", "--store", "nowhere.db"), 2, "there is no store nowhere.db"),
        (("rollouts", "list", "--run", "a", "--store", "b"), 2, "Give one of them"),
        (("rollouts", "list", "--state", "done"), 2, "Allowed: queuing"),
        (("rollouts", "list"), 2, "there is no run in"),
        (("gateway", "gateway.prt=1"), 2, "Did you mean gateway.port?"),
        (("gateway", "none.yaml"), 2, "there is no file none.yaml"),
        (("controller", "--runner", "k9s"), 2, "Allowed: local"),
        (("serve",), 2, "Give --model"),
        (("config", "check", "none.yaml"), 2, "there is no file"),
    ],
)
def test_errors_are_one_line_with_a_way_out(
    arguments: tuple[str, ...], code: int, part: str, tmp_path: Path
) -> None:
    failed = agl(*arguments, cwd=tmp_path)
    assert failed.returncode == code
    assert part in failed.stderr
    assert failed.stderr.count("\n") == 1
    assert failed.stdout == ""


def test_as_a_program_an_error_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentlightning", "rollouts", "list", "--run", "nowhere"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr == "nowhere holds no store.db. Give --run the folder of a run.\n"


def test_help_documents_every_key() -> None:
    text = agl("train", "--help").stdout
    assert not [each.key for each in every_setting() if each.key not in text]


def test_serving_commands_do_not_load_torch() -> None:
    code = (
        "import sys, agentlightning.cli, agentlightning.gateway.app; print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert shown.stdout == "False\n"


def test_config_check_prints_what_results_without_the_key() -> None:
    example = ROOT / "examples/calculator/calculator.yaml"
    shown = agl("config", "check", example, "trainer.updates=3", "gateway.key=s3cret").stdout
    assert "updates: 3" in shown
    assert "s3cret" not in shown


async def test_doctor_says_whether_an_upstream_is_trainable() -> None:
    async with ScriptedModelServer(lambda _: Reply("abc", fault="no_logprobs")) as server:
        shown = await asyncio.to_thread(
            agl, "doctor", "--upstream", server.url, "--model", "policy"
        )
    assert shown.returncode == 1
    assert "not trainable" in shown.stderr
    assert "logprobs are missing" in shown.stderr
    assert "torch" in shown.stdout


def test_settings_on_the_command_line() -> None:
    assert split(None) == (None, [])
    assert split(["a.yaml", "b.c=1"]) == (Path("a.yaml"), ["b.c=1"])
    assert split(["b.c=1"]) == (None, ["b.c=1"])
    both = sampling(None, ["sampling.top_k=5", "validation.temperature=0.2"])
    assert both["train"] == {"temperature": 1.0, "top_p": 1.0, "top_k": 5}
    assert both["val"] == {"temperature": 0.2, "top_p": 1.0, "top_k": 5}


def test_a_running_rollout_after_a_lost_attempt() -> None:
    rollout = Rollout("r", {}, state="running", attempt=2, attempt_id="a2", started_at=1.0)
    assert next(describe(rollout, (), (), ())).startswith("rollout r  running  attempt 2 of 2")


def test_an_attempt_that_was_given_up_leaves_as_many_as_before() -> None:
    rollout = Rollout("r", {}, state="running", attempt=2, attempt_id="a2", started_at=1.0)
    attempts = [
        Attempt("r", "a1", 1, 0.0, ended_at=1.0, outcome=Outcome("cancelled", message="stopped")),
        Attempt("r", "a2", 2, 1.0),
    ]
    assert next(describe(rollout, attempts, (), ())).startswith(
        "rollout r  running  attempt 2 of 3"
    )


def test_diagnosis_without_a_known_fault_gives_the_last_lines_only() -> None:
    lines = list(diagnose(Rollout("r", {}), "\n".join(f"line {n}" for n in range(9))))
    assert lines == ["  last lines of stderr:", *(f"    line {n}" for n in range(4, 9))]
