"""Answers that the gateway gives itself, in the error form of the dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import orjson

from agentlightning.address import Provider
from agentlightning.errors import GatewayError

Fault = Literal["agent", "gateway", "model_server"]

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class Refusal(GatewayError):
    """Ends a call with an error answer that says whose fault it is.

    Example:
        >>> Refusal(404, "unknown_path", "There is no /v1/files here.").type
        'agent_error'
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        fault: Fault = "agent",
        headers: Mapping[str, str] | None = None,
        raw: bytes | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.type = f"{fault}_error"
        self.headers = dict(headers or {})
        self._raw = raw

    def body(self, provider: Provider = "openai") -> bytes:
        """The error as JSON in the provider's form; ``raw``, where given, as it is."""
        if self._raw is not None:
            return self._raw
        if provider == "anthropic":
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
            message = f"{self} [{self.type}: {self.code}]"
            return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})
        error = {"message": str(self), "type": self.type, "param": None, "code": self.code}
        return orjson.dumps({"error": error})
