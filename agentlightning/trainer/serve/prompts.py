"""From a request to token ids that the model can take."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError

from agentlightning.trainer.serve.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    RequestError,
)


@dataclass(frozen=True)
class ServedModel:
    """What the handlers know of the model. ``name`` is what requests call it."""

    name: str
    tokenizer: Any
    max_context: int
    vocabulary: int
    eos_ids: frozenset[int]
    chat_template: str | None = None


def chat_prompt(model: ServedModel, chat: ChatRequest) -> list[int]:
    """The messages as the model's template writes them; raises RequestError."""
    try:
        ids: list[int] = model.tokenizer.apply_chat_template(
            [_normalised(message) for message in chat.messages],
            tools=chat.offered_tools,
            chat_template=model.chat_template,
            add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
            continue_final_message=chat.continue_final_message,
            tokenize=True,
            return_dict=False,
            **(chat.chat_template_kwargs or {}),
        )
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise RequestError(
            f"messages: the chat template cannot write them: {error}.", param="messages"
        ) from error
    return ids


def completion_prompts(model: ServedModel, completion: CompletionRequest) -> list[list[int]]:
    """Text is tokenised, ids are taken as they are."""
    return [
        model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        for prompt in completion.prompts()
    ]


def check(model: ServedModel, request: GenerationRequest) -> None:
    """Raises RequestError where ``request`` wants another model or tokens that do not exist."""
    if request.model is not None and request.model != model.name:
        raise RequestError(
            f"The model {request.model!r} does not exist here; this server has {model.name!r}.",
            status=404,
            param="model",
        )
    wrong = [i for i in request.logit_bias or {} if not 0 <= i < model.vocabulary]
    if wrong:
        raise RequestError(
            f"logit_bias: {wrong[0]} is no token id; allowed are 0 to {model.vocabulary - 1}.",
            param="logit_bias",
        )


def token_limit(model: ServedModel, prompt: list[int], asked: int | None) -> int:
    """Most tokens that may be sampled after ``prompt``; raises RequestError."""
    wrong = [i for i in prompt if not 0 <= i < model.vocabulary]
    if wrong or not prompt:
        what = f"{wrong[0]} is no token id" if wrong else "it is empty"
        raise RequestError(
            f"prompt: {what}; allowed ids are 0 to {model.vocabulary - 1}.", param="prompt"
        )
    if len(prompt) + (asked or 1) > model.max_context:
        raise RequestError(
            f"This model's maximum context length is {model.max_context} tokens, but the prompt "
            f"has {len(prompt)} and {asked or 1} were asked for. Shorten the prompt or lower "
            "max_tokens.",
            param="max_tokens" if asked and len(prompt) < model.max_context else "messages",
        )
    return asked or model.max_context - len(prompt)


def _normalised(message: dict[str, Any]) -> dict[str, Any]:
    """Templates take text: a missing content is empty, text parts are joined, and a call's
    arguments are an object as the Hermes templates expect."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
    calls = [_call_with_object(call) for call in message.get("tool_calls") or ()]
    return message | {"content": content or ""} | ({"tool_calls": calls} if calls else {})


def _call_with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    # Where the model wrote no JSON, the template gets what it wrote.
    with suppress(ValueError, TypeError):
        function["arguments"] = json.loads(function.get("arguments") or "{}")
    return call | {"function": function}
