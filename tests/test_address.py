from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning import address

ids = st.text(min_size=1, max_size=30).filter(lambda text: text.isprintable())


@given(rollout=ids, attempt=ids, mode=st.sampled_from(["train", "val"]))
def test_any_id_survives_the_round_trip(rollout: str, attempt: str, mode: str) -> None:
    for build, provider in (
        (address.openai_base_url, "openai"),
        (address.anthropic_base_url, "anthropic"),
    ):
        url = build("http://host:1/", rollout, attempt, mode)
        parsed = address.parse(url.removeprefix("http://host:1") + "/x/y")
        assert parsed == address.AttemptAddress(rollout, attempt, mode, provider, "/x/y")


@pytest.mark.parametrize(
    "path",
    [
        "/proxy/rollout/r/attempt/a/mode/test/openai/v1/models",
        "/proxy/rollout/r/attempt/a/mode/train/openai/v2/models",
        "/proxy/rollout/a/b/attempt/a/mode/train/openai/v1",
        "/proxy/rollout//attempt/a/mode/train/openai/v1",
        "/x/proxy/rollout/r/attempt/a/mode/train/openai/v1",
        "/proxy/rollout/r/attempt/a/mode/train/openai/v1x",
    ],
)
def test_other_paths_are_no_addresses(path: str) -> None:
    assert address.parse(path) is None


def test_event_url() -> None:
    assert address.event_url("http://h", "a/b", "1") == (
        "http://h/api/rollouts/a%2Fb/attempt/1/events"
    )
