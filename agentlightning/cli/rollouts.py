"""``agl rollouts``: what ran, how it ended, what it printed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.output import console, number, print_table, since
from agentlightning.cli.stores import (
    GatewayOption,
    KeyOption,
    Place,
    RunOption,
    StoreOption,
    every_rollout,
    find_rollout,
    place,
    with_store,
)
from agentlightning.errors import ConfigError, NotFound
from agentlightning.store import Store
from agentlightning.types import Attempt, Call, Event, Outcome, Rollout

app = typer.Typer(help="List, show and cancel rollouts; print their logs.", no_args_is_help=True)

RolloutId = Annotated[str, typer.Argument(metavar="ROLLOUT", help="Its id, or the id's beginning.")]

_TAIL_LINES = 5
_STATES = ("queuing", "running", "succeeded", "failed", "cancelled")
_FIXES = (
    (r"ModuleNotFoundError", "install it where the agent runs, or set agent.env / agent.python"),
    (r"PermissionError|Permission denied", "make the file readable or executable for the agent"),
    (
        r"No such file or directory|FileNotFoundError",
        "correct the path; agents start in their own"
        " workspace (agent.workspace.copy_from fills it)",
    ),
    (
        r"KeyError: '[A-Z_]+'",
        "the agent reads a variable that it does not get: set agent.env, "
        "agent.env_map or agent.pass_env",
    ),
    (
        r"APIConnectionError|Connection refused",
        "see that the agent uses OPENAI_BASE_URL, and that the gateway runs",
    ),
    (r"MemoryError|Killed", "give it more memory, or lower controller.max_running"),
)


@app.command("list")
def list_(
    *,
    state: Annotated[
        list[str] | None, typer.Option("--state", help="Only these states; may be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 50,
    store: StoreOption = None,
    run: RunOption = None,
    gateway: GatewayOption = None,
    key: KeyOption = None,
) -> None:
    """List rollouts, the newest last."""
    wrong = sorted(set(state or ()) - set(_STATES))
    if wrong:
        raise ConfigError(f"--state {wrong[0]!r} is no state. Allowed: {', '.join(_STATES)}.")

    async def read(opened: Store) -> list[Rollout]:
        found = [r async for r in every_rollout(opened) if not state or r.state in state]
        return found[-limit:]

    rollouts = with_store(place(store, run, gateway, key), read)
    headers = ("rollout", "state", "mode", "attempt", "reward", "outcome", "changed", "group")
    print_table(headers, [_row(each) for each in rollouts])


@app.command("show")
def show(
    rollout: RolloutId,
    *,
    store: StoreOption = None,
    run: RunOption = None,
    gateway: GatewayOption = None,
    key: KeyOption = None,
) -> None:
    """Show one rollout: its state, attempts, reward, and why it failed."""
    where = place(store, run, gateway, key)

    async def read(opened: Store) -> tuple[Rollout, list[Attempt], list[Call], list[Event]]:
        found = await find_rollout(opened, rollout)
        name = found.rollout_id
        return (
            found,
            await opened.attempts(name),
            await opened.calls(name),
            (await opened.events(name)),
        )

    found, attempts, calls, events = with_store(where, read)
    out = console()
    for line in describe(found, attempts, calls, events):
        out.print(line, markup=False)
    if found.state == "failed":
        for line in diagnose(found, _stderr(where, found)):
            out.print(line, markup=False)


@app.command("logs")
def logs(
    rollout: RolloutId,
    *,
    attempt: Annotated[str | None, typer.Option(help="Attempt id. Default: the last.")] = None,
    stream: Annotated[str, typer.Option(help="stdout, stderr or both.")] = "both",
    store: StoreOption = None,
    run: RunOption = None,
    gateway: GatewayOption = None,
    key: KeyOption = None,
) -> None:
    """Print what an agent wrote to stdout and stderr."""
    if stream not in ("stdout", "stderr", "both"):
        raise ConfigError(f"--stream is {stream!r}. Allowed: stdout, stderr, both.")
    where = place(store, run, gateway, key)
    found = with_store(where, lambda opened: find_rollout(opened, rollout))
    names = ("stdout", "stderr") if stream == "both" else (stream,)
    files = [file for name in names if (file := _log_file(where, found, attempt, name))]
    if not files:
        raise NotFound(
            f"no logs of rollout {found.rollout_id} here. They lie where its controller ran, in "
            f"ROOT/{found.rollout_id}/{attempt or found.attempt_id}/; give --run that run's folder."
        )
    for file in files:
        if len(files) > 1:
            typer.echo(f"==> {file} <==")
        typer.echo(file.read_text(errors="replace"), nl=False)


@app.command("cancel")
def cancel(
    rollouts: Annotated[list[str], typer.Argument(metavar="ROLLOUT...")],
    *,
    store: StoreOption = None,
    run: RunOption = None,
    gateway: GatewayOption = None,
    key: KeyOption = None,
) -> None:
    """Cancel rollouts: their agents are ended, nothing of them is trained."""

    async def work(opened: Store) -> list[tuple[Rollout, Rollout]]:
        found = [await find_rollout(opened, each) for each in rollouts]
        return [(each, await opened.cancel(each.rollout_id)) for each in found]

    for before, after in with_store(place(store, run, gateway, key), work):
        already = " already" if before.terminal else ""
        typer.echo(f"{after.rollout_id}  {after.state}{already}")


def describe(
    rollout: Rollout, attempts: Sequence[Attempt], calls: Sequence[Call], events: Sequence[Event]
) -> Iterator[str]:
    """The first line says how it stands; then what else is known, a line each."""
    before = [each.outcome.kind for each in attempts[:-1] if each.outcome is not None]
    last = rollout.config.get("max_attempts", 2) + before.count("cancelled")
    yield (
        f"rollout {rollout.rollout_id}  {rollout.state}  attempt {rollout.attempt} of {last}"
        f"  {how_it_ended(rollout, calls)}"
    ).rstrip()
    for each in attempts:
        ended = outcome_text(each.outcome) or f"running since {since(each.started_at)}"
        yield f"  attempt {each.number}  {each.attempt_id}  {ended}"
    yield f"  task      {rollout.input!s}"
    yield f"  group     {rollout.group_id or '-'}   mode {rollout.mode}"
    trained = sum(call.trainable for call in calls)
    yield f"  calls     {len(calls)}, of them trainable {trained}"
    for reason in sorted({call.reason or "no reason" for call in calls if not call.trainable}):
        yield f"            not trainable: {reason}"
    rewards = [event for event in events if event.event_type == "reward"]
    detail = "".join(
        f"   {name}: {rewards[-1].data[name]}"
        for name in ("source", "reason")
        if rewards and name in rewards[-1].data
    )
    yield f"  reward    {number(rollout.reward)}{detail}"
    if rollout.error_message:
        yield f"  error     {rollout.error_message}"


def how_it_ended(rollout: Rollout, calls: Sequence[Call]) -> str:
    """For people: ``agent exited 1 before its first call``."""
    text = outcome_text(rollout.outcome)
    if rollout.outcome and rollout.outcome.kind == "agent_error" and not calls:
        return f"{text} before its first call"
    if rollout.state == "running" and rollout.started_at:
        return f"running for {since(rollout.started_at)}"
    return text


def outcome_text(outcome: Outcome | None) -> str:
    """An outcome in a few words.

    Example:
        >>> outcome_text(Outcome("agent_error", exit_code=1))
        'agent exited 1'
    """
    if outcome is None:
        return ""
    if outcome.kind == "agent_error" and outcome.exit_code is not None:
        code = outcome.exit_code
        text = f"agent exited {code}" if code >= 0 else f"agent ended by signal {-code}"
    else:
        text = outcome.kind.replace("_", " ")
    return f"{text}: {outcome.message}" if outcome.message else text


def diagnose(rollout: Rollout, stderr: str) -> Iterator[str]:
    """The last lines that a failed agent wrote, and what to do where that is known."""
    lines = stderr.strip().splitlines()[-_TAIL_LINES:]
    if lines:
        yield "  last lines of stderr:"
        yield from (f"    {line}" for line in lines)
    message = rollout.outcome.message if rollout.outcome else None
    hint = fix("\n".join([*lines, message or "", rollout.error_message or ""]))
    if hint:
        yield f"  fix: {hint}"


def fix(text: str) -> str | None:
    """What helps against a fault that is seen often.

    Example:
        >>> fix("ModuleNotFoundError: No module named 'sympy'")
        'install it where the agent runs, or set agent.env / agent.python'
    """
    return next((hint for pattern, hint in _FIXES if re.search(pattern, text)), None)


def _row(rollout: Rollout) -> tuple[str, ...]:
    return (
        rollout.rollout_id,
        rollout.state,
        rollout.mode,
        str(rollout.attempt),
        number(rollout.reward),
        outcome_text(rollout.outcome) or "-",
        since(rollout.updated_at),
        rollout.group_id or "-",
    )


def _stderr(where: Place, rollout: Rollout) -> str:
    file = _log_file(where, rollout, None, "stderr")
    return file.read_text(errors="replace") if file else ""


def _log_file(where: Place, rollout: Rollout, attempt: str | None, name: str) -> Path | None:
    """The log of an attempt in the run's folder, or below the current one."""
    from dataclasses import replace

    from agentlightning.controller.launch import folders

    wanted = replace(rollout, attempt_id=attempt or rollout.attempt_id)
    roots = [root / "agents" for root in (where.run, Path()) if root is not None]
    files = [folders(root, wanted).base / f"{name}.log" for root in roots]
    return next((file for file in files if file.is_file()), None)
