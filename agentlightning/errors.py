"""The exception tree. The class says which room failed; the text says what, the value
got, what is allowed and what to do."""

from __future__ import annotations


class AgentLightningError(Exception):
    """Everything this package raises on purpose. ``exit_code`` is the command line's."""

    exit_code = 1


class ConfigError(AgentLightningError):
    """A setting, a task file or a launch spec is wrong."""

    exit_code = 2


class CredentialError(AgentLightningError):
    """A credential is missing, wrong, expired or lacks a scope."""


class StoreError(AgentLightningError):
    """The store failed."""


class NotFound(StoreError):
    """No record has that id."""


class Conflict(StoreError):
    """A compare-and-swap lost, or the transition is not allowed."""


class StoreVersionError(StoreError):
    """The store file was written by a newer version of the package."""


class StoreUnavailable(StoreError):
    """The store did not answer within the bound."""


class GatewayError(AgentLightningError):
    """The gateway failed."""


class NoUpstream(GatewayError):
    """No model server is registered for the model."""


class UpstreamError(GatewayError):
    """A model server did not answer, or answered with a fault."""


class ControllerError(AgentLightningError):
    """The rollout controller failed."""


class LaunchError(ControllerError):
    """An agent could not be started; retrying the same spec would fail again."""


class EvaluatorError(ControllerError):
    """A grader raised, ran out of time, or gave a reward that is not a finite number."""


class TrainerError(AgentLightningError):
    """The trainer failed."""


class NotTrainable(TrainerError):
    """The upstream does not give what training needs (ids, logprobs of what was sampled)."""


class ModelError(TrainerError):
    """A model folder or name cannot be loaded."""


class ServiceError(AgentLightningError):
    """A service could not start or died too often."""


class Interrupted(AgentLightningError):
    """A signal ended the work; the command line's exit code is 128 and the signal's number."""

    def __init__(self, text: str, *, signal_number: int) -> None:
        super().__init__(text)
        self.exit_code = 128 + signal_number
