"""From a launch spec to what is started: command line, environment, folders. Pure but for
the folders that :func:`prepare` makes."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import StrictUndefined, Template
from jinja2.exceptions import TemplateError
from jinja2.sandbox import SandboxedEnvironment
from pydantic import ValidationError

from agentlightning import address, credentials
from agentlightning.config import LaunchConfig, LocalLaunch
from agentlightning.controller.spawn import ProcessSpec
from agentlightning.errors import LaunchError
from agentlightning.types import Json, Rollout

DEFAULT_TIME_LIMIT = 300.0
"""Seconds that an agent may run whose spec has no ``timeout_seconds``."""

_CREDENTIAL_SLACK = 60.0
_LONGEST_VARIABLE = 100_000
"""Bytes; Linux refuses to start a program with a variable over 128 KiB."""


@dataclass(frozen=True, slots=True)
class Folders:
    """Where an attempt lives: ``{root}/{rollout}/{attempt_id}/``.

    Example:
        >>> Folders(Path("/runs/x/rollouts/r1/a1")).workspace
        PosixPath('/runs/x/rollouts/r1/a1/workspace')
    """

    base: Path

    @property
    def workspace(self) -> Path:
        return self.base / "workspace"

    @property
    def home(self) -> Path:
        return self.base / "home"

    @property
    def task(self) -> Path:
        return self.base / "task.json"

    @property
    def stdout(self) -> Path:
        return self.base / "stdout.log"

    @property
    def stderr(self) -> Path:
        return self.base / "stderr.log"


@dataclass(frozen=True, slots=True)
class Gateway:
    """What the controller knows of the gateway. The key signs the agents' credentials."""

    url: str
    admin_key: str


def folders(root: Path, rollout: Rollout) -> Folders:
    """The folders of a rollout's current attempt, as absolute paths."""
    return Folders(root.absolute() / _safe(rollout.rollout_id) / _safe(rollout.attempt_id or "0"))


def parse(rollout: Rollout) -> LaunchConfig:
    """The launch spec of a rollout; LaunchError where it is no such thing."""
    try:
        return LaunchConfig.model_validate(rollout.config)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise LaunchError(
            f"config.{key} is {first['input']!r}: {first['msg']}. Mend the launch spec."
        ) from error


def local_launch(launch: LaunchConfig) -> LocalLaunch:
    """The part for this machine, with exactly one program in it."""
    local = launch.local
    given = [local.command, local.python, local.agent_class] if local else []
    if local is None or sum(each is not None for each in given) != 1:
        raise LaunchError(
            "config.local must name exactly one of command, python and agent_class; it names "
            f"{sum(each is not None for each in given)}. Give one in the launch spec."
        )
    return local


def time_limit(launch: LaunchConfig) -> float:
    """Seconds from start to TERM."""
    return launch.timeout_seconds or DEFAULT_TIME_LIMIT


def prepare(rollout: Rollout, where: Folders, source: str | None) -> None:
    """Makes the attempt's folders, fills the workspace from ``source``, writes the task."""
    where.home.mkdir(parents=True, exist_ok=True)
    where.task.write_text(json.dumps(rollout.input))
    if source is None:
        where.workspace.mkdir(exist_ok=True)
        return
    try:
        shutil.copytree(source, where.workspace, symlinks=True, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        raise LaunchError(
            f"workspace.copy_from {source!r} cannot be copied: {error}. It must be a readable "
            f"folder, absolute or relative to {Path.cwd()}."
        ) from error


def process_spec(
    rollout: Rollout, launch: LaunchConfig, where: Folders, gateway: Gateway
) -> ProcessSpec:
    """What the fork server starts for the rollout's current attempt; ``launch`` is its
    :func:`parse`."""
    local = local_launch(launch)
    render = Renderer(rollout.input, launch.model)
    kind, target, args = _program(local, render)
    return ProcessSpec(
        kind=kind,
        target=target,
        args=args,
        cwd=str(where.workspace),
        stdout=str(where.stdout),
        stderr=str(where.stderr),
        env=_environment(rollout, launch, where, gateway),
        preload=() if kind == "command" else tuple(local.preload),
        output_limit=local.output_limit,
    )


class Renderer:
    """Renders templates over ``task`` and ``model``; what is not there is an error.

    Example:
        >>> Renderer({"question": "2+2"}, "policy").text("ask {{ task.question }}", "args[0]")
        'ask 2+2'
    """

    def __init__(self, task: Json, model: str | None) -> None:
        self._values = {"task": task, "model": model or ""}

    def text(self, template: str, where: str) -> str:
        try:
            return _template(template).render(self._values)
        except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise LaunchError(
                f"config.local.{where} {template!r}: {error}. Templates see `task` "
                f"({_fields(self._values['task'])}) and `model`."
            ) from error


@functools.lru_cache(maxsize=256)
def _template(text: str) -> Template:
    """Compiling one takes longer than all else in starting an agent; many rollouts share one."""
    return SandboxedEnvironment(undefined=StrictUndefined, autoescape=False).from_string(text)


def _environment(
    rollout: Rollout, launch: LaunchConfig, where: Folders, gateway: Gateway
) -> dict[str, str]:
    """The whole environment of an agent. Later entries win: ours, ``pass_env``, ``env_map``,
    ``env``."""
    local = local_launch(launch)
    render = Renderer(rollout.input, launch.model)
    env = base_environment(where) | _addresses(rollout, launch, gateway) | _task(rollout, where)
    for name in local.pass_env:
        if name not in os.environ:
            raise LaunchError(
                f"config.local.pass_env names {name}, which the controller's own environment "
                "lacks. Set it there, or take the name out."
            )
        env[name] = os.environ[name]
    for name, path in local.env_map.items():
        env[name] = _mapped(rollout.input, path, name)
    for name, template in local.env.items():
        env[name] = render.text(template, f"env.{name}")
    return env


def base_environment(where: Folders) -> dict[str, str]:
    """What every program needs and nothing that says who started it."""
    path = os.environ.get("PATH", os.defpath)
    return {"PATH": path, "HOME": str(where.home), "LANG": "C.UTF-8"}


def _addresses(rollout: Rollout, launch: LaunchConfig, gateway: Gateway) -> dict[str, str]:
    local = local_launch(launch)
    attempt = rollout.attempt_id or ""
    trusted = local.evaluate is not None and local.evaluate.event
    key = credentials.sign(
        gateway.admin_key,
        rollout.rollout_id,
        attempt,
        scopes=["call", "reward"] if trusted else ["call"],
        seconds=time_limit(launch) + local.grace + _CREDENTIAL_SLACK,
    )
    who = (gateway.url, rollout.rollout_id, attempt)
    openai = address.openai_base_url(*who, rollout.mode)
    anthropic = address.anthropic_base_url(*who, rollout.mode)
    values = {
        openai: ("AGL_OPENAI_BASE_URL", "OPENAI_BASE_URL", "OPENAI_API_BASE"),
        anthropic: ("AGL_ANTHROPIC_BASE_URL", "ANTHROPIC_BASE_URL"),
        key: ("AGL_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
        address.event_url(*who): ("AGL_EVENT_URL",),
    }
    env = {name: value for value, names in values.items() for name in names}
    return env | {
        "AGL_ROLLOUT_ID": rollout.rollout_id,
        "AGL_ATTEMPT_ID": attempt,
        "AGL_MODE": rollout.mode,
        "AGL_MODEL": launch.model or "",
    }


def _task(rollout: Rollout, where: Folders) -> dict[str, str]:
    """A task too long for a variable is in the file only."""
    text = json.dumps(rollout.input)
    env = {"AGL_TASK_FILE": str(where.task)}
    return env | {"AGL_TASK": text} if len(text) <= _LONGEST_VARIABLE else env


def _program(
    local: LocalLaunch, render: Renderer
) -> tuple[Literal["command", "script", "module", "class"], str, list[str]]:
    args = [render.text(part, f"args[{i}]") for i, part in enumerate(local.args)]
    if local.agent_class is not None:
        if "." not in local.agent_class:
            raise LaunchError(
                f"config.local.agent_class {local.agent_class!r} is not package.module.Class."
            )
        return "class", local.agent_class, args
    if local.python is not None and not local.python.endswith(".py"):
        return "module", local.python, args
    if local.python is not None:
        return "script", _existing(local.python), args
    argv = [render.text(part, f"command[{i}]") for i, part in enumerate(local.command or [])]
    if not argv or not argv[0]:
        raise LaunchError("config.local.command is empty. Give a program and its arguments.")
    program = str(Path(argv[0]).absolute()) if "/" in argv[0] else argv[0]
    return "command", program, argv[1:]


def _existing(script: str) -> str:
    path = Path(script).absolute()
    if not path.is_file():
        raise LaunchError(
            f"config.local.python: there is no script {script!r} in {Path.cwd()}. "
            "Give its path from there, an absolute path, or a module's dotted name."
        )
    return str(path)


def _mapped(task: Json, path: str, name: str) -> str:
    """The value of one ``env_map`` entry: a path into the task, or a literal."""
    first, *keys = path.split(".")
    if first != "input":
        return path
    value = task
    for key in keys:
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise LaunchError(
                f"config.local.env_map.{name}: there is no {path!r} in the task "
                f"({_fields(task)}): {key!r} is not there."
            ) from error
    return value if isinstance(value, str) else json.dumps(value)


def _fields(task: Any) -> str:
    if isinstance(task, Mapping):
        return "fields: " + ", ".join(map(str, task))
    return f"a {type(task).__name__}"


def _safe(name: str) -> str:
    """A file name for any id: itself where it can be, else with a hash that keeps it unique."""
    if re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:60]}-{digest}"
