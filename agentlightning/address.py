"""The address of an attempt: built and parsed here and nowhere else.

    /proxy/rollout/{rollout_id}/attempt/{attempt_id}/mode/{train|val}/openai/v1/…
    /proxy/rollout/{rollout_id}/attempt/{attempt_id}/mode/{train|val}/anthropic/…

Ids may hold any characters; each is percent-encoded into one path segment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast
from urllib.parse import quote, unquote

from agentlightning.types import Mode

Provider = Literal["openai", "anthropic"]

_PATTERN = re.compile(
    r"^/proxy/rollout/(?P<rollout>[^/]+)/attempt/(?P<attempt>[^/]+)/mode/(?P<mode>train|val)"
    r"/(?P<provider>openai/v1|anthropic)(?P<rest>/.*)?$"
)


@dataclass(frozen=True, slots=True)
class AttemptAddress:
    """Whose call it is, and what is asked below the base.

    Example:
        >>> address = parse("/proxy/rollout/a%2Fb%3A0/attempt/1/mode/val/openai/v1/models")
        >>> address.rollout_id, address.provider, address.rest
        ('a/b:0', 'openai', '/models')
    """

    rollout_id: str
    attempt_id: str
    mode: Mode
    provider: Provider
    rest: str = ""


@lru_cache(maxsize=4096)  # an agent sends all its calls to one path
def parse(raw_path: str) -> AttemptAddress | None:
    """Parses a path as it was sent (still percent-encoded); None if it is no such address."""
    match = _PATTERN.match(raw_path)
    if match is None:
        return None
    return AttemptAddress(
        rollout_id=unquote(match["rollout"]),
        attempt_id=unquote(match["attempt"]),
        mode=cast(Mode, match["mode"]),
        provider="openai" if match["provider"] == "openai/v1" else "anthropic",
        rest=match["rest"] or "",
    )


def openai_base_url(gateway: str, rollout_id: str, attempt_id: str, mode: Mode) -> str:
    """What an OpenAI client takes as its base URL."""
    return f"{_attempt_url(gateway, rollout_id, attempt_id, mode)}/openai/v1"


def anthropic_base_url(gateway: str, rollout_id: str, attempt_id: str, mode: Mode) -> str:
    """What an Anthropic client takes as its base URL (it appends ``/v1/messages``)."""
    return f"{_attempt_url(gateway, rollout_id, attempt_id, mode)}/anthropic"


def event_url(gateway: str, rollout_id: str, attempt_id: str) -> str:
    """Where an attempt's events are posted."""
    rollout, attempt = quote(rollout_id, safe=""), quote(attempt_id, safe="")
    return f"{gateway.rstrip('/')}/api/rollouts/{rollout}/attempt/{attempt}/events"


def _attempt_url(gateway: str, rollout_id: str, attempt_id: str, mode: Mode) -> str:
    rollout, attempt = quote(rollout_id, safe=""), quote(attempt_id, safe="")
    return f"{gateway.rstrip('/')}/proxy/rollout/{rollout}/attempt/{attempt}/mode/{mode}"
