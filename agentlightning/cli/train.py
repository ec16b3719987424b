"""``agl train`` and ``agl eval``: everything on one machine, from one command."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agentlightning.cli.display import Display
from agentlightning.cli.services import ServiceSpec, Supervisor
from agentlightning.config import Config, load_config
from agentlightning.errors import ConfigError, Interrupted, NotTrainable
from agentlightning.serving import bound_url, listen
from agentlightning.store import open_store
from agentlightning.trainer.checkpoint import latest_checkpoint, load_progress
from agentlightning.trainer.forward import Sampler
from agentlightning.trainer.loop import RunResult, Trainer
from agentlightning.trainer.models import resolve_model
from agentlightning.trainer.probe import probe
from agentlightning.trainer.publish import Publisher
from agentlightning.trainer.report import plot_rewards, summarise
from agentlightning.trainer.run_folder import RunFolder, existing_run_folder, new_run_folder
from agentlightning.trainer.tasks import load_run_tasks
from agentlightning.trainer.torch_policy import TorchPolicy

T = TypeVar("T")

MODEL = "policy"
"""The name under which the gateway and the model server know the model that is trained."""


def train(config_path: Path, overrides: Sequence[str], *, resume: bool, display: Display) -> None:
    """Trains as the configuration says; leaves everything in the run's folder."""
    config = load_config(config_path, overrides)
    find = existing_run_folder if resume else new_run_folder
    folder = find(config.run.root, config.run.name, config_path.stem)
    if resume:
        _refuse_other_run(config, folder)
        _refuse_fewer_updates(config, folder)
    _run(config, folder, resume=resume, display=display)


def evaluate(config_path: Path, overrides: Sequence[str], *, display: Display) -> None:
    """Measures the configuration's model on its held-out tasks, in a run folder of its own."""
    config = load_config(config_path, [*overrides, "trainer.updates=0"])
    if config.tasks.val is None:
        raise ConfigError("config: tasks.val is missing: there is nothing to evaluate on.")
    folder = new_run_folder(config.run.root, config.run.name, f"{config_path.stem}-eval")
    _run(config, folder, resume=False, display=display)


def _run(config: Config, folder: RunFolder, *, resume: bool, display: Display) -> None:
    _check_inputs(config)
    folder.acquire()
    try:
        folder.write_config(config)
        asyncio.run(_ended_by_signals(_train(config, folder, resume=resume, display=display)))
    finally:
        folder.release()


async def _train(config: Config, folder: RunFolder, *, resume: bool, display: Display) -> None:
    started = time.monotonic()
    shutil.rmtree(folder.weights)  # what a resumed run serves first comes from its checkpoint
    folder.weights.mkdir()
    display.phase(f"model {config.model}", 0, 1)
    model = await asyncio.to_thread(resolve_model, config.model)
    loading = asyncio.create_task(asyncio.to_thread(_load_policy, config, model))
    async with _services(config, folder, model=model, display=display) as services:
        policy = await loading
        display.fact("model", policy.description)
        display.fact("gateway", f"{services.gateway_url}   store {folder.path / 'store.db'}")
        display.fact("check", await _check(services.server_url))
        async with _trainer(config, folder, services, policy, display) as trainer:
            result = await services.supervisor.unless_failed(trainer.run(resume=resume))
    summary = summarise(
        config, result, policy=policy.description, wall_seconds=time.monotonic() - started
    )
    folder.write_summary(summary)
    plot_rewards(folder.metrics(), result, folder.plot_file)
    _show_end(result, folder, display)


def _load_policy(config: Config, model: Path) -> TorchPolicy:
    sampling = config.sampling
    sampler = Sampler(sampling.temperature, sampling.top_p, sampling.top_k)
    return TorchPolicy(model, config.trainer, seed=config.seed, sampler=sampler)


@dataclass(frozen=True, slots=True)
class _Services:
    supervisor: Supervisor
    gateway_url: str
    server_url: str


@asynccontextmanager
async def _services(
    config: Config, folder: RunFolder, *, model: Path, display: Display
) -> AsyncIterator[_Services]:
    """Gateway, model server and controller, running; ended when the block is left.

    We bind the sockets and keep them, so that a service that is started again finds the
    connections that came meanwhile waiting.
    """
    with (
        closing(listen(config.gateway.host, config.gateway.port)) as gateway,
        closing(listen("127.0.0.1", 0)) as server,
    ):
        specs = _specs(config, folder, model=model, gateway=gateway, server=server)
        supervisor = Supervisor(specs, display.warn)
        try:
            await supervisor.start("gateway", "model-server", "controller")
            yield _Services(supervisor, bound_url(gateway), bound_url(server))
        finally:
            await supervisor.stop()


def _specs(
    config: Config,
    folder: RunFolder,
    *,
    model: Path,
    gateway: socket.socket,
    server: socket.socket,
) -> list[ServiceSpec]:
    settings = str(folder.config_file)
    key = {"AGL_ADMIN_KEY": config.gateway.key or folder.admin_key()}
    gateway_arguments = ["gateway", settings, "--store", folder.store_url]
    controller_arguments = ["controller", settings, "--gateway", bound_url(gateway)]
    server_arguments = ["serve", settings, "--model", str(model), "--served-name", MODEL]

    def spec(
        name: str, arguments: Callable[[], list[str]], sock: socket.socket | None = None
    ) -> ServiceSpec:
        sockets = () if sock is None else (sock.fileno(),)
        return ServiceSpec(name, arguments, folder.logs / f"{name}.log", key, sockets)

    return [
        spec("gateway", lambda: [*gateway_arguments, "--fd", str(gateway.fileno())], gateway),
        spec(
            "model-server",
            lambda: [*server_arguments, "--fd", str(server.fileno()), *_newest_weights(folder)],
            server,
        ),
        spec("controller", lambda: [*controller_arguments, "--root", str(folder.agents)]),
    ]


def _newest_weights(folder: RunFolder) -> list[str]:
    """Arguments with which a model server that comes back serves what it served before."""
    exports = {int(path.name.rpartition("-")[2]): path for path in folder.weights.glob("version-*")}
    if not exports:
        return []
    version = max(exports)
    return ["--weights", str(exports[version]), "--version", str(version)]


@asynccontextmanager
async def _trainer(
    config: Config, folder: RunFolder, services: _Services, policy: TorchPolicy, display: Display
) -> AsyncIterator[Trainer]:
    key = config.gateway.key or folder.admin_key()
    store = await open_store(services.gateway_url, key=key)
    publisher = Publisher(
        store=store,
        model=MODEL,
        gateway_url=services.gateway_url,
        admin_key=key,
        server_url=services.server_url,
        weights=folder.weights,
    )
    try:
        yield Trainer(
            config,
            folder=folder,
            store=store,
            policy=policy,
            publisher=publisher,
            model=MODEL,
            observer=display,
        )
    finally:
        await store.close()


async def _check(server_url: str) -> str:
    """Refuses to train on a server that does not give what training needs."""
    result = await probe(f"{server_url}/v1", MODEL)
    if not result.trainable:
        raise NotTrainable("the model server cannot be trained on: " + "; ".join(result.problems))
    return f"model server gives ids and logprobs ({result.logprobs_mode}): trainable"


def _refuse_other_run(config: Config, folder: RunFolder) -> None:
    """A run goes on only with the model, seed and tasks that it began with."""
    began = load_config(folder.config_file)
    for key in ("model", "seed", "tasks"):
        old, new = getattr(began, key), getattr(config, key)
        if old != new:
            raise ConfigError(
                f"config: {key} is {new!s}, but {folder.path} began with {old!s}. Resume with the "
                "same, or start a new run."
            )


def _check_inputs(config: Config) -> None:
    """What can be wrong with files is said before anything is started."""
    load_run_tasks(config)
    script = config.agent.python
    if script is not None and script.endswith(".py") and not Path(script).is_file():
        raise ConfigError(f"config: agent.python: there is no script {script} in {Path.cwd()}.")
    if config.chat_template is not None and not config.chat_template.is_file():
        raise ConfigError(f"config: chat_template: there is no file {config.chat_template}.")


def _refuse_fewer_updates(config: Config, folder: RunFolder) -> None:
    """What a run has done cannot be taken back: its summary would describe no run at all."""
    checkpoint = latest_checkpoint(folder.path)
    done = load_progress(checkpoint).step if checkpoint is not None else 0
    if done > config.trainer.updates:
        raise ConfigError(
            f"config: trainer.updates is {config.trainer.updates}, but {folder.path} has made "
            f"{done} steps already. Resume with at least {done}, or start a new run."
        )


async def _ended_by_signals(work: Coroutine[Any, Any, T]) -> T:
    """Runs ``work``; SIGTERM and SIGINT cancel it, so that every service is ended in order."""
    task = asyncio.ensure_future(work)
    received: list[int] = []

    def end(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(
            "interrupted; go on from the last checkpoint with --resume", signal_number=received[0]
        ) from None


def _show_end(result: RunResult, folder: RunFolder, display: Display) -> None:
    before, after = result.before, result.after
    if before is not None and after is not None:
        difference = after.difference(before)
        display.fact(
            "change",
            f"{difference.mean:+.2f} over {difference.n} tasks, 95 % interval "
            f"{difference.low:+.2f} … {difference.high:+.2f}",
        )
    names = ["summary.json", "metrics.jsonl", "reward.png", "store.db"]
    checkpoint = latest_checkpoint(folder.path)
    if checkpoint is not None:
        names.append(f"{checkpoint.name}/")
    display.fact("wrote", f"{folder.path}/  " + "  ".join(names))
