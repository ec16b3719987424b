"""What happens in the forked process: it becomes the agent. Standard library only."""

from __future__ import annotations

import asyncio
import atexit
import gc
import importlib
import inspect
import os
import pkgutil  # noqa: F401  # runpy imports it late, in each agent anew
import random
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from agentlightning.controller import processes


def main(
    spec: Mapping[str, Any], *, stdout: int, stderr: int, status: int, parent: int
) -> NoReturn:
    """Never returns. What prevents the start is written to ``status``, which closes once the
    agent's own code runs."""
    code = 1
    try:
        _become(spec, stdout=stdout, stderr=stderr, parent=parent)
        status = processes.keep_only(status)
        program = _program(spec)
        os.close(status)
    except BaseException as error:  # whatever it is, the controller is told
        os.write(status, _start_error(spec, error).encode()[:60_000])
        os._exit(1)
    try:
        code = _run(program)
    finally:
        os._exit(code)


def _become(spec: Mapping[str, Any], *, stdout: int, stderr: int, parent: int) -> None:
    os.setsid()
    processes.die_with_parent(parent)
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(spec["env"])
    os.chdir(spec["cwd"])


def _program(spec: Mapping[str, Any]) -> Callable[[], object]:
    """The agent's code as a function; for a command line this call is the agent."""
    kind, target = spec["kind"], spec["target"]
    if kind == "command":
        for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores these; programs expect them
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        os.execvpe(target, [target, *spec["args"]], os.environ)
    _fresh_interpreter([target, *spec["args"]])
    if kind == "script":
        sys.path[0] = str(Path(target).parent)
        return lambda: runpy.run_path(target, run_name="__main__")
    if kind == "module":
        return lambda: runpy.run_module(target, run_name="__main__", alter_sys=True)
    if kind == "evaluator":
        module = importlib.import_module("agentlightning.controller.evaluate")
        return lambda: module.run_in_child(target, *spec["args"])
    module_name, _, class_name = target.rpartition(".")
    agent_class = getattr(importlib.import_module(module_name), class_name)
    return lambda: _run_agent(agent_class)


def _fresh_interpreter(argv: list[str]) -> None:
    """Undoes what a fork inherits and a new interpreter would not have."""
    gc.enable()
    atexit._clear()
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.argv[:] = argv
    # New ones: the inherited streams believe that they write to the fork server's log file.
    # A line at a time, so that an agent that is killed leaves what it said.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def _run_agent(agent_class: Callable[[], Any]) -> None:
    result = agent_class().run()
    if inspect.isawaitable(result):
        asyncio.run(_await(result))


async def _await(result: Any) -> object:
    return await result


def _run(program: Callable[[], object]) -> int:
    """Runs the program as the interpreter would; returns its exit code."""
    code = 0
    try:
        program()
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter: waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _start_error(spec: Mapping[str, Any], error: BaseException) -> str:
    return f"{spec['kind']} {spec['target']!r} cannot start: {type(error).__name__}: {error}"
