"""The commands that run something: training, evaluation and the services."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from agentlightning.config import (
    ControllerConfig,
    GatewayConfig,
    SamplingConfig,
    ServeConfig,
    load_config,
    load_section,
    read_tree,
)
from agentlightning.config import ValidationConfig as Validation
from agentlightning.errors import ConfigError, ServiceError
from agentlightning.serving import LISTEN_FD, configure_logging, end_with_parent, hide_from_agents
from agentlightning.types import Json, Mode

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")]
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="YAML file and settings over it."),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Settings over the file's.")
]
Host = Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on; 0 picks a free one.")]
Key = Annotated[str | None, typer.Option(help="Admin key. Default: AGL_ADMIN_KEY.")]
Fd = Annotated[int | None, typer.Option("--fd", help="Inherited listening socket.", hidden=True)]


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    *,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")
    ] = False,
) -> None:
    """Train as CONFIG says: gateway, controller, model server and trainer on this machine."""
    load_config(config, overrides or [])  # a mistake is said before torch is imported
    from agentlightning.cli.display import Display
    from agentlightning.cli.train import train as run

    configure_logging("WARNING")
    with Display() as display:
        run(config, overrides or [], resume=resume, display=display)


def evaluate(config: ConfigFile, overrides: Overrides = None) -> None:
    """Measure the model of CONFIG on its held-out tasks; train nothing."""
    load_config(config, overrides or [])
    from agentlightning.cli.display import Display
    from agentlightning.cli.train import evaluate as run

    configure_logging("WARNING")
    with Display() as display:
        run(config, overrides or [], display=display)


def gateway(
    settings: Settings = None,
    *,
    host: Host = None,
    port: Port = None,
    store: Annotated[
        str, typer.Option(help="Where calls are recorded: sqlite:///path/file.db or a path.")
    ] = "sqlite:///agl.db",
    key: Key = None,
    fd: Fd = None,
) -> None:
    """Start the gateway; it prints its address when it is ready."""
    path, overrides = split(settings)
    overrides += _given("gateway", host=host, port=8181 if port is None and not path else port)
    section = load_section(GatewayConfig, "gateway", path, overrides)
    section = section.model_copy(update={"key": key}) if key else section
    modes = sampling(path, overrides)
    _inherit(fd)
    configure_logging()
    end_with_parent()
    hide_from_agents()

    from agentlightning.gateway.app import run  # after the checks: an error comes at once

    run(section, store_url=store if "://" in store else f"sqlite:///{store}", sampling=modes)


def controller(
    settings: Settings = None,
    *,
    gateway: Annotated[str, typer.Option(help="Address of the gateway.")] = "http://127.0.0.1:8181",
    key: Key = None,
    runner: Annotated[str, typer.Option(help="Where agents run: `local`, this machine.")] = "local",
    root: Annotated[Path, typer.Option(help="Folder of workspaces and logs.")] = Path("agents"),
) -> None:
    """Start the rollout controller: it runs the agents of queued rollouts."""
    if runner != "local":
        raise ConfigError(f"controller: --runner is {runner!r}. Allowed: local.")
    from agentlightning.controller.loop import run
    from agentlightning.store import open_store

    path, overrides = split(settings)
    section = load_section(ControllerConfig, "controller", path, overrides)
    admin_key = key or os.environ.get("AGL_ADMIN_KEY", "")
    configure_logging()
    end_with_parent()
    hide_from_agents()

    async def serve() -> None:
        store = await open_store(gateway, key=admin_key)
        try:
            await run(section, store=store, gateway_url=gateway, admin_key=admin_key, root=root)
        finally:
            await store.close()

    asyncio.run(serve())


def serve(
    settings: Settings = None,
    *,
    model: Annotated[
        str | None, typer.Option(help="Folder, Hugging Face name or `smollm2-135m`.")
    ] = None,
    served_name: Annotated[str | None, typer.Option(help="Name that clients ask for.")] = None,
    host: Host = None,
    port: Port = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file used instead of the model's.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Folder whose weights serve instead of the model's own.")
    ] = None,
    version: Annotated[int, typer.Option(help="Policy version of the weights.")] = 0,
    fd: Fd = None,
) -> None:
    """Start the embedded model server; it prints its address when it is ready."""
    path, overrides = split(settings)
    section = load_section(ServeConfig, "serve", path, overrides)
    tree = read_tree(path, overrides)
    name = model or tree.get("model")
    if not name:
        raise ConfigError("serve: no model. Give --model DIR, or a CONFIG that names one.")
    template = chat_template or tree.get("chat_template")
    _inherit(fd)
    configure_logging()
    end_with_parent()

    from agentlightning.trainer.serve import run  # after the checks: it takes seconds

    run(
        section,
        model=name,
        served_name=served_name,
        host=host or "127.0.0.1",
        port=8282 if port is None else port,
        chat_template=Path(template) if template else None,
        version=version,
        weights=weights,
    )


def split(settings: list[str] | None) -> tuple[Path | None, list[str]]:
    """``[CONFIG] [KEY=VALUE]…`` as they came on the command line.

    Example:
        >>> split(["run.yaml", "gateway.port=1"])
        (PosixPath('run.yaml'), ['gateway.port=1'])
    """
    given = list(settings or [])
    if given and "=" not in given[0]:
        return Path(given[0]), given[1:]
    return None, given


def sampling(path: Path | None, overrides: list[str]) -> dict[Mode, dict[str, Json]]:
    """What the gateway lays over each call's own sampling parameters, by mode."""
    train = load_section(SamplingConfig, "sampling", path, overrides)
    val = load_section(Validation, "validation", path, overrides)
    fixed = {key: value for key, value in train.model_dump().items() if value is not None}
    return {"train": fixed, "val": {**fixed, "temperature": val.temperature}}


def _given(section: str, **values: object) -> list[str]:
    return [f"{section}.{key}={value}" for key, value in values.items() if value is not None]


def _inherit(fd: int | None) -> None:
    if fd is None:
        return
    try:
        os.fstat(fd)
    except OSError as error:
        raise ServiceError(f"--fd {fd} is no open descriptor of this process.") from error
    os.environ[LISTEN_FD] = str(fd)
