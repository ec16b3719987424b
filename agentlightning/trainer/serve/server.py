"""Loads a model and serves it until a signal ends the process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from starlette.applications import Starlette
from transformers import AutoTokenizer, GenerationConfig

from agentlightning import serving
from agentlightning.config import ServeConfig
from agentlightning.errors import ModelError
from agentlightning.trainer.models import fast_dtype, pick_device, resolve_model
from agentlightning.trainer.serve.app import ModelApp
from agentlightning.trainer.serve.engine import Engine
from agentlightning.trainer.serve.prompts import ServedModel
from agentlightning.trainer.serve.runner import ModelRunner


def run(
    config: ServeConfig,
    *,
    model: str,
    served_name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    chat_template: Path | None = None,
    version: int = 0,
    weights: Path | None = None,
) -> None:
    """Serves ``model`` (see resolve_model) as ``served_name``, by default its own name.

    ``weights`` is a folder whose weights serve instead of the model's own, as ``version``.
    Raises ModelError and ServiceError before anything listens; returns after SIGTERM or SIGINT.
    """
    sock = serving.listen(host, port)
    try:
        app = build_app(
            config,
            folder=weights or resolve_model(model),
            tokenizer_folder=resolve_model(model),
            name=served_name or model,
            chat_template=chat_template,
            version=version,
        )
        serving.serve_app(app, sock, name="model server")
    finally:
        sock.close()


def build_app(
    config: ServeConfig,
    *,
    folder: Path,
    name: str,
    tokenizer_folder: Path | None = None,
    chat_template: Path | None = None,
    version: int = 0,
) -> Starlette:
    """The server as an ASGI application; its lifespan starts and ends the engine."""
    template = _template_text(chat_template)
    tokenizer = load_tokenizer(tokenizer_folder or folder)
    device = pick_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    runner = ModelRunner(
        folder,
        dtype=fast_dtype(config.precision, device),
        device=device,
        pool_rows=config.cache_tokens,
    )
    served = ServedModel(
        name=name,
        tokenizer=tokenizer,
        max_context=min(
            runner.max_context, config.max_context or runner.max_context, config.cache_tokens
        ),
        vocabulary=runner.vocabulary,
        eos_ids=eos_ids(folder, tokenizer),
        chat_template=template,
    )
    engine = Engine(
        runner,
        cache_tokens=config.cache_tokens,
        max_running=config.max_running,
        version=version,
    )
    return ModelApp(served, engine).asgi()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder; raises ModelError."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model: {folder} has no tokenizer that can be loaded: {error}. Save the tokenizer "
            "into the same folder."
        ) from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ModelError(
            f"model: the tokenizer of {folder} is not of the `tokenizers` library, which "
            "streaming needs. Convert it and save tokenizer.json."
        )
    return tokenizer


def eos_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: the tokenizer's and the generation config's."""
    ids = {tokenizer.eos_token_id}
    if (folder / "generation_config.json").is_file():
        listed = GenerationConfig.from_pretrained(folder).eos_token_id
        ids |= set(listed) if isinstance(listed, list) else {listed}
    return frozenset(int(i) for i in ids if i is not None)


def _template_text(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"chat template: {path} cannot be read: {error.strerror}.") from error
