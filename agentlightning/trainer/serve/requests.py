"""What requests may say: OpenAI's API with vLLM's ``return_token_ids``. Fields that we do not
know are ignored."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, DirectoryPath, Field, ValidationError

from agentlightning.errors import AgentLightningError
from agentlightning.trainer.serve.sampler import Sampling
from agentlightning.types import Json

_Finite = Field(allow_inf_nan=False)


class RequestError(AgentLightningError):
    """A request that cannot be served. ``status`` is the HTTP status, ``param`` the field."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 404:
            kind = "not_found_error"
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self.param,
                "code": self.status,
            }
        }


class _StreamOptions(BaseModel):
    include_usage: bool | None = None


class GenerationRequest(BaseModel):
    """What both endpoints share. ``null`` is the default, as not giving the field."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[int, Annotated[float, _Finite]] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None

    @property
    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def limit(self) -> int | None:
        """Most tokens to sample, or None for what the context leaves."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Alternatives to report with each token; None: no logprobs at all."""
        raise NotImplementedError

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or -1,
            logit_bias=self.logit_bias or {},
            top_logprobs=self.alternatives or 0,
        )


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Json]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Json]] | None = None
    tool_choice: Json = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Json] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> list[dict[str, Json]] | None:
        return None if self.tool_choice == "none" else self.tools or None


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``. Without ``max_tokens``, 16, as OpenAI's."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def limit(self) -> int | None:
        return self.max_tokens or 16

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt by itself; raises RequestError where there is none."""
        prompt: Any = self.prompt
        if prompt and (isinstance(prompt, str) or isinstance(prompt[0], int)):
            prompt = [prompt]
        if not prompt or not all(prompt):
            raise RequestError(
                "prompt is empty. Give text, token ids, or a list of those.", param="prompt"
            )
        return prompt  # type: ignore[no-any-return]


class UpdateRequest(BaseModel):
    """``POST /update_weights``: the folder of the new weights, and what they are called."""

    path: DirectoryPath
    version: int = Field(ge=0, strict=True)


R = TypeVar("R", bound=BaseModel)


def parse(kind: type[R], body: bytes) -> R:
    """The request in ``body``; raises RequestError that names the parameter."""
    try:
        content = json.loads(body)
        if b"\\ud" in body.lower():  # half of a surrogate pair is no text: no tokenizer takes it
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}. Send one JSON object.") from error
    if not isinstance(content, dict):
        raise RequestError(f"the body is a JSON {type(content).__name__}. Send one JSON object.")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else None
        got = (
            "" if first["type"] == "missing" else f" is {json.dumps(content.get(name or ''))[:200]}"
        )
        raise RequestError(f"{name}{got}: {first['msg']}.", param=name) from error
