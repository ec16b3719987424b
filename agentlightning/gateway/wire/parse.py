"""JSON as model servers write it."""

from __future__ import annotations

import json

import orjson

from agentlightning.gateway.wire.answer import dict_of
from agentlightning.types import Json

SHAPE_ERRORS = (TypeError, ValueError, KeyError, AttributeError)
"""What reading an answer of an unknown shape raises."""


def parse_json(data: bytes) -> dict[str, Json]:
    """An object; some servers write NaN, which only the standard library reads.

    Raises TypeError or ValueError on anything else.
    """
    try:
        return dict_of(orjson.loads(data))
    except orjson.JSONDecodeError:
        return dict_of(json.loads(data))
