"""From a launch spec to what is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentlightning import credentials
from agentlightning.controller import launch
from agentlightning.controller.launch import Gateway
from agentlightning.controller.spawn import ProcessSpec
from agentlightning.errors import LaunchError
from agentlightning.types import Rollout

Make = Callable[..., Rollout]


def spec_of(rollout: Rollout, root: Path, gateway: Gateway) -> ProcessSpec:
    rollout = replace(rollout, attempt_id="a1")
    where = launch.folders(root, rollout)
    return launch.process_spec(rollout, launch.parse(rollout), where, gateway)


def test_the_environment_is_the_wire_contract_and_nothing_else(
    rollout: Make, tmp_path: Path, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_ADMIN_KEY", "secret")
    each = rollout("true", "a/b:0", config={"model": "policy"})
    env = dict(spec_of(each, tmp_path, gateway).env)
    base = f"{gateway.url}/proxy/rollout/a%2Fb%3A0/attempt/a1/mode/train"
    for name in ("AGL_OPENAI_BASE_URL", "OPENAI_BASE_URL", "OPENAI_API_BASE"):
        assert env.pop(name) == f"{base}/openai/v1"
    for name in ("AGL_ANTHROPIC_BASE_URL", "ANTHROPIC_BASE_URL"):
        assert env.pop(name) == f"{base}/anthropic"
    keys = {env.pop(n) for n in ("AGL_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY")}
    assert keys == {env.pop("ANTHROPIC_AUTH_TOKEN")}
    assert env.pop("AGL_EVENT_URL").endswith("/api/rollouts/a%2Fb%3A0/attempt/a1/events")
    assert json.loads(env.pop("AGL_TASK")) == {"question": "2+2"}
    assert env.pop("AGL_TASK_FILE").endswith("/task.json")
    ids = [env.pop(f"AGL_{name}") for name in ("ROLLOUT_ID", "ATTEMPT_ID", "MODE", "MODEL")]
    assert ids == ["a/b:0", "a1", "train", "policy"]
    assert set(env) == {"PATH", "HOME", "LANG"}


@pytest.mark.parametrize(("event", "scopes"), [(True, {"call", "reward"}), (False, {"call"})])
def test_only_its_own_judge_may_post_a_reward(
    rollout: Make, tmp_path: Path, gateway: Gateway, event: bool, scopes: set[str]
) -> None:
    evaluate = {"event": True} if event else {"python": "m:f"}
    key = spec_of(rollout("true", evaluate=evaluate), tmp_path, gateway).env["AGL_KEY"]
    credential = credentials.check(gateway.admin_key, key)
    assert (credential.rollout_id, credential.attempt_id) == ("r1", "a1")
    assert credential.scopes == scopes


def test_templates_see_task_and_model(rollout: Make, tmp_path: Path, gateway: Gateway) -> None:
    each = rollout(
        command=["solve", "{{ task.question }}; rm -rf", "--model={{ model }}"],
        env={"Q": "{{ task.question }}!"},
        config={"model": "policy"},
    )
    spec = spec_of(each, tmp_path, gateway)
    assert (spec.target, spec.args) == ("solve", ["2+2; rm -rf", "--model=policy"])
    assert spec.env["Q"] == "2+2!"


def test_env_map_takes_paths_into_the_task(rollout: Make, tmp_path: Path, gateway: Gateway) -> None:
    task = {"a": [{"b": "text"}, {"b": [1, 2]}]}
    paths = {"S": "input.a.0.b", "J": "input.a.1.b", "ALL": "input", "L": "literal.x"}
    env = spec_of(rollout("true", task=task, env_map=paths), tmp_path, gateway).env
    assert (env["S"], env["J"], env["L"]) == ("text", "[1, 2]", "literal.x")
    assert json.loads(env["ALL"]) == task


def test_pass_env_names_what_may_pass(
    rollout: Make, tmp_path: Path, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEARCH_KEY", "s")
    each = rollout("true", pass_env=["SEARCH_KEY"])
    assert spec_of(each, tmp_path, gateway).env["SEARCH_KEY"] == "s"


@pytest.mark.parametrize(
    ("local", "what"),
    [
        ({}, "exactly one of command, python and agent_class; it names 0"),
        ({"command": ["a"], "python": "b"}, "it names 2"),
        ({"command": ["{{ task.nope }}"]}, r"command\[0\].*fields: question"),
        ({"command": ["{{ broken"]}, r"command\[0\]"),
        ({"command": []}, "command is empty"),
        ({"python": "no_such.py"}, "no script 'no_such.py'"),
        ({"agent_class": "Agent"}, "package.module.Class"),
        ({"command": ["a"], "env_map": {"X": "input.a.b"}}, "env_map.X.*'input.a.b'"),
        ({"command": ["a"], "pass_env": ["AGL_NOT_SET"]}, "AGL_NOT_SET"),
        ({"command": "a b"}, "config.local.command is 'a b'"),
    ],
)
def test_a_wrong_spec_says_what_and_where(
    rollout: Make, tmp_path: Path, gateway: Gateway, local: dict[str, Any], what: str
) -> None:
    with pytest.raises(LaunchError, match=what):
        spec_of(rollout(**local), tmp_path, gateway)


def test_a_long_task_is_in_the_file_only(rollout: Make, tmp_path: Path, gateway: Gateway) -> None:
    each = replace(rollout("true", task={"text": "x" * 200_000}), attempt_id="a1")
    where = launch.folders(tmp_path, each)
    launch.prepare(each, where, None)
    assert "AGL_TASK" not in spec_of(each, tmp_path, gateway).env
    assert json.loads(where.task.read_text()) == each.input


@pytest.mark.parametrize("rollout_id", ["../../etc", "a/b", "..", "x" * 300, "ü", "", "a b"])
def test_any_id_becomes_a_folder_of_its_own(tmp_path: Path, rollout_id: str) -> None:
    base = launch.folders(tmp_path, Rollout(rollout_id, {}, attempt_id="a1")).base
    assert base.parent.parent == tmp_path
    assert base.resolve() == base
    assert base != launch.folders(tmp_path, Rollout(rollout_id + "_", {}, attempt_id="a1")).base


def test_the_workspace_is_a_copy(rollout: Make, tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "a.txt").write_text("a")
    each = replace(rollout("true"), attempt_id="1")
    where = launch.folders(tmp_path, each)
    launch.prepare(each, where, str(tmp_path / "repo"))
    assert (where.workspace / "a.txt").read_text() == "a"
    with pytest.raises(LaunchError, match=r"copy_from 'nope'"):
        launch.prepare(each, where, "nope")
