"""The command line ``agl``. A command imports what it needs when it runs, so that
``agl gateway`` loads no torch."""

from __future__ import annotations

import sys

import typer

from agentlightning.cli import commands, doctor, export, inspect, rollouts, settings
from agentlightning.errors import AgentLightningError

app = typer.Typer(
    name="agl",
    help="Train the model behind an agent, with the agent's own harness in the loop.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("train", epilog=settings.epilog())(commands.train)
app.command("eval")(commands.evaluate)
app.command("gateway")(commands.gateway)
app.command("controller")(commands.controller)
app.command("serve")(commands.serve)
app.add_typer(rollouts.app, name="rollouts")
app.command("calls")(inspect.calls)
app.command("samples")(inspect.samples)
app.command("export")(export.export)
app.command("doctor")(doctor.doctor)
app.add_typer(settings.app, name="config")


def main() -> None:
    """``agl``: a known error is one line on stderr and the exit code of its class."""
    run(sys.argv[1:])


def gateway_main() -> None:
    """``agl-server``: the gateway."""
    run(["gateway", *sys.argv[1:]])


def controller_main() -> None:
    """``agl-controller``: the rollout controller."""
    run(["controller", *sys.argv[1:]])


def run(arguments: list[str]) -> None:
    """Runs one command line and exits with its code."""
    try:
        app(arguments, prog_name="agl")
    except AgentLightningError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
