"""Reading the configuration: overrides, durations, and errors that name the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentlightning.config import Config, GatewayConfig, known_keys, load_config, load_section
from agentlightning.errors import ConfigError

YAML = """
model: some-model
agent: {python: agent.py, time_limit: 2m}
evaluate: grade:reward
tasks: {train: train.jsonl}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(YAML)
    return file


def test_reads_the_file_and_lays_overrides_over_it(path: Path) -> None:
    config = load_config(path, ["trainer.updates=3", "agent.args=[a, b]", "agent.env.A=text"])
    assert config.trainer.updates == 3
    assert config.agent.args == ["a", "b"]
    assert config.evaluate.python == "grade:reward"


@pytest.mark.parametrize(
    ("text", "seconds"), [("250ms", 0.25), ("60s", 60), ("5m", 300), ("1h", 3600), ("7", 7)]
)
def test_durations(path: Path, text: str, seconds: float) -> None:
    assert load_config(path, [f"agent.time_limit={text}"]).agent.time_limit == seconds


@pytest.mark.parametrize("text", ["-1s", "0", "soon", ".inf", ".nan"])
def test_wrong_durations_are_refused(path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"agent\.time_limit"):
        load_config(path, [f"agent.time_limit={text}"])


def test_an_unknown_key_names_the_nearest(path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["trainer.learning_rte=1e-5"])
    assert str(caught.value) == (
        "config: trainer.learning_rte is not a setting. Did you mean trainer.learning_rate?"
    )


def test_every_error_is_told_at_once(path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["trainer.updates=-1", "sampling.top_p=2"])
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("agent.command=[run]", "exactly one of python, agent_class and command"),
        ("evaluate={python: a:b, event: true}", "exactly one of python, command and event"),
        ("trainer.updates", "Write key=value"),
    ],
)
def test_contradictions_are_refused(path: Path, override: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        load_config(path, [override])


def test_a_missing_file_and_broken_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file"):
        load_config(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1,")
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load_config(broken)


def test_missing_keys_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("model: m")
    with pytest.raises(ConfigError, match=r"config: agent is missing\."):
        load_config(empty)


def test_a_service_reads_its_section_only(path: Path) -> None:
    assert load_section(GatewayConfig, "gateway", path, ["gateway.port=8181"]).port == 8181
    with pytest.raises(ConfigError, match=r"Did you mean gateway\.port\?"):
        load_section(GatewayConfig, "gateway", path, ["gateway.prt=1"])


def test_known_keys_reach_the_leaves() -> None:
    keys = set(known_keys(Config))
    assert {"trainer.loss.clip_low", "trainer.lora.rank", "agent.workspace.keep"} <= keys
