"""What a run's sampling configuration makes of a request, and what was really used."""

from __future__ import annotations

from collections.abc import Mapping

from agentlightning.types import Json

RECORDED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "max_completion_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "seed",
    "n",
    "tool_choice",
    "response_format",
)
"""Fields that decide what is sampled; they are kept with the call."""

LENGTHS = ("max_completion_tokens", "max_tokens")


def apply(body: dict[str, Json], sampling: Mapping[str, Json]) -> None:
    """Lays the run's sampling over a request; the smaller of two length bounds holds."""
    for name, value in sampling.items():
        if name != "max_tokens" and value is not None:
            body[name] = value
    _bound_length(body, sampling.get("max_tokens"))


def used(body: Mapping[str, Json]) -> dict[str, Json]:
    """The sampling fields of a request as it went to the model server."""
    found = {name: body[name] for name in RECORDED if body.get(name) is not None}
    if "max_completion_tokens" in found:
        found["max_tokens"] = found.pop("max_completion_tokens")
    return found


def prepare(request: Mapping[str, Json], sampling: Mapping[str, Json]) -> dict[str, Json]:
    """What the dialects change alike: sampling, ids, usage, and forms that servers refuse."""
    body = dict(request)
    apply(body, sampling)
    body["return_token_ids"] = True
    if body.get("stream"):
        options = body.get("stream_options")
        body["stream_options"] = {
            **(options if isinstance(options, dict) else {}),
            "include_usage": True,
        }
    else:
        body.pop("stream_options", None)
    return body


def wants_usage(request: Mapping[str, Json]) -> bool:
    """Whether the client asked for the usage chunk of a stream."""
    options = request.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def choices(request: Mapping[str, Json]) -> int:
    """How many choices the client asked for; a value that is no count is the server's to refuse."""
    n = request.get("n")
    return n if isinstance(n, int) and n > 0 else 1


def _bound_length(body: dict[str, Json], bound: int | None) -> None:
    if bound is None:
        return
    name = next((name for name in LENGTHS if body.get(name) is not None), "max_tokens")
    wanted = body.get(name)
    for other in LENGTHS:
        body.pop(other, None)
    body[name] = min(wanted, bound) if isinstance(wanted, int) else wanted or bound
