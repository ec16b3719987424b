"""The nouns of the system as frozen records. Standard library only.

Token arrays are ``array`` objects, not lists: 4 bytes an element, and torch and numpy
read them without a copy. Build them with :func:`token_array`, :func:`float_array` and
:func:`mask_array`.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Json: TypeAlias = Any
"""Anything that ``json.loads`` returns."""

Tokens: TypeAlias = "array[int]"
"""Token ids, policy versions: ``array('i')``, 4 bytes an element."""

Floats: TypeAlias = "array[float]"
"""Log-probabilities in nats: ``array('f')``, 4 bytes an element."""

Mask: TypeAlias = "array[int]"
"""0 or 1 an element: ``array('b')``, 1 byte an element."""

Mode: TypeAlias = Literal["train", "val"]
Dialect: TypeAlias = Literal["chat", "completions", "responses", "messages"]
RolloutState: TypeAlias = Literal["queuing", "running", "succeeded", "failed", "cancelled"]
OutcomeKind: TypeAlias = Literal[
    "completed",  # the agent ended by itself with exit code 0
    "agent_error",  # non-zero exit code, a signal, or an exception in run()
    "time_limit",  # the agent was ended because its time was up
    "lost",  # pod evicted, process vanished, node gone, controller gone
    "launch_error",  # the agent could not be started
    "evaluator_error",  # the agent ended, its grader failed or ran out of time
    "cancelled",
]
CallStatus: TypeAlias = Literal["ok", "error", "undelivered"]

TERMINAL_STATES: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
INFRASTRUCTURE_OUTCOMES: frozenset[str] = frozenset({"lost", "launch_error", "evaluator_error"})
"""Faults that are not the agent's: never trained as reward 0."""

ALLOWED_TRANSITIONS: Mapping[str, frozenset[str]] = {
    "queuing": frozenset({"running", "failed", "cancelled"}),
    "running": TERMINAL_STATES,
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}


def token_array(values: Iterable[int] = ()) -> Tokens:
    """Token ids as ``array('i')``; raises OverflowError or TypeError on anything else."""
    return _packed("i", values)


def float_array(values: Iterable[float] = ()) -> Floats:
    """Floats as ``array('f')``, rounded to single precision."""
    return _packed("f", values)


def mask_array(values: Iterable[int] = ()) -> Mask:
    """Zeros and ones as ``array('b')``."""
    return array("b", values)


def _packed(kind: Literal["i", "f"], values: Iterable[Any]) -> array[Any]:
    """``array(kind, values)`` in a third of its time."""
    values = tuple(values)
    try:
        return array(kind, struct.pack(f"{len(values)}{kind}", *values))
    except (struct.error, OverflowError):
        return array(kind, values)  # which rounds, or raises what it should


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended.

    Example:
        >>> Outcome("agent_error", exit_code=1, message="ModuleNotFoundError: sympy").kind
        'agent_error'
    """

    kind: OutcomeKind
    exit_code: int | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """One execution of an agent on one task.

    ``version`` grows by one with each change and is what compare-and-swap compares.
    ``attempt`` counts the attempts begun (0: none yet); ``attempt_id`` names the current
    one. ``owner`` holds the rollout until ``lease_until`` (Unix seconds). ``config`` is the
    launch spec as it came over the wire (see :class:`agentlightning.config.LaunchConfig`).

    Example:
        >>> Rollout("r1", input={"question": "2+2"}, group_id="g1").state
        'queuing'
    """

    rollout_id: str
    input: Json
    group_id: str | None = None
    mode: Mode = "train"
    config: Mapping[str, Json] = field(default_factory=dict)
    metadata: Mapping[str, Json] = field(default_factory=dict)
    harness: str | None = None
    state: RolloutState = "queuing"
    version: int = 0
    attempt: int = 0
    attempt_id: str | None = None
    owner: str | None = None
    lease_until: float | None = None
    outcome: Outcome | None = None
    error_message: str | None = None
    reward: float | None = None
    k8s_job_name: str | None = None
    created_at: float = 0.0
    updated_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL_STATES


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at running a rollout. ``ended_at`` is set once it is over.

    Example:
        >>> Attempt("r1", "a1-5f2c", number=1, started_at=0.0).outcome is None
        True
    """

    rollout_id: str
    attempt_id: str
    number: int
    started_at: float
    ended_at: float | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens ``[start, end)`` of a completion were sampled by policy version ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer: the ids and logprobs exactly as the model server reported them.

    ``logprobs`` is None where the server gave none (never zeros). ``spans`` cover all of
    ``token_ids`` in order; they are empty where the version is not known.

    Example:
        >>> c = Completion(token_array([5, 7]), float_array([-0.5, -0.25]), "stop")
        >>> len(c.token_ids)
        2
    """

    token_ids: Tokens
    logprobs: Floats | None = None
    finish_reason: str | None = None
    spans: tuple[VersionSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class ParentRef:
    """The completion whose ``prompt_ids + token_ids`` starts a call's prompt."""

    call_id: str
    completion: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One model request of the harness and its answer.

    ``sequence`` (per attempt, from 0, in order of commit) and ``parent`` are given by the
    store. ``sampling`` is what was really used (temperature, top_p, top_k, …,
    ``logprobs_mode``). ``trainable`` is False with a ``reason`` for whatever the trainer
    must not learn from. Times are Unix seconds.

    Example:
        >>> call = Call("c1", "r1", "a1", prompt_ids=token_array([1, 2]),
        ...             completions=(Completion(token_array([3]), float_array([-0.1])),))
        >>> call.trainable
        True
    """

    call_id: str
    rollout_id: str
    attempt_id: str
    prompt_ids: Tokens
    completions: tuple[Completion, ...]
    sequence: int = 0
    dialect: Dialect = "chat"
    requested_model: str = ""
    model: str = ""
    upstream: str = ""
    sampling: Mapping[str, Json] = field(default_factory=dict)
    version_start: int | None = None
    version_end: int | None = None
    status: CallStatus = "ok"
    trainable: bool = True
    reason: str | None = None
    error: str | None = None
    http_status: int | None = None
    streamed: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    started_at: float = 0.0
    first_byte_at: float | None = None
    ended_at: float = 0.0
    parent: ParentRef | None = None


@dataclass(frozen=True, slots=True)
class RawCall:
    """Request and response of a call as JSON bytes, kept apart from the tokens.

    ``request`` is what the harness sent. ``response`` is what it got (a streamed answer as
    one assembled body), without ids and logprobs: those live in the :class:`Call`.
    ``parsed`` is ``request`` as an object, where the caller has it: a store need not read it again.
    """

    request: bytes
    response: bytes
    parsed: Json = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was said about an attempt; a reward is ``event_type="reward"``.

    Example:
        >>> Event("e1", "r1", "a1", "reward", {"value": 1.0}, created_at=0.0).data["value"]
        1.0
    """

    event_id: str
    rollout_id: str
    attempt_id: str
    event_type: str
    data: Mapping[str, Json]
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelServer:
    """A model server that the gateway may forward to: "version v is served at url u".

    ``endpoint`` is the base URL that ends in ``/v1``.
    """

    model: str
    endpoint: str
    version: int = 0
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class TerminalItem:
    """A rollout that ended; ``position`` orders rollouts by completion, from 1."""

    position: int
    rollout_id: str
    state: RolloutState
    data_id: str | None
    is_train: bool


@dataclass(frozen=True, slots=True)
class TerminalPage:
    """Rollouts that ended after a position. ``next_after`` asks for what comes next."""

    items: tuple[TerminalItem, ...]
    next_after: int
    total_terminal: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One training row: a root-to-leaf path through an attempt's calls.

    Four arrays of one length. Where ``loss_mask`` is 0 the token is context:
    ``rollout_logprobs`` is 0.0 and ``policy_versions`` is -1 there, and neither is read.

    Example:
        >>> s = Sample("r1", "g1", 1.0, token_array([1, 2, 3]), mask_array([0, 0, 1]),
        ...            float_array([0, 0, -0.5]), token_array([-1, -1, 4]))
        >>> s.trained_tokens
        1
    """

    rollout_id: str
    group_id: str | None
    reward: float | None
    token_ids: Tokens
    loss_mask: Mask
    rollout_logprobs: Floats
    policy_versions: Tokens

    @property
    def trained_tokens(self) -> int:
        return sum(self.loss_mask)


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task and with them their rewards.

    Example:
        >>> g = Group("g1", (Rollout("r1", {}, reward=1.0), Rollout("r2", {}, reward=None)))
        >>> [r.reward for r in g.rollouts]
        [1.0, None]
    """

    group_id: str
    rollouts: tuple[Rollout, ...]
