"""A small process that forks agents from an interpreter with the imports already done.

    python -m agentlightning.controller.forkserver FD '["openai"]'

It imports the modules named (dotted names, or ``path.py``) once, says ``{"ready": true}`` or
``{"error": …}`` on the inherited socket FD, and from then on forks one :mod:`warden
<agentlightning.controller.warden>` for each socket that it is sent. The warden talks to the
controller over that socket without another word through here: killing a fork server ends no
running agent, and the end of the controller ends each of them.

Standard library only, and little of it: every import here is carried by every agent.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import sys
import traceback

from agentlightning.controller import processes, warden
from agentlightning.controller.target import import_target

_LAST_WAIT = 10.0
"""Longest wait, in seconds, for a warden to end once the controller is gone."""


def main(fd: int, preload: list[str]) -> int:
    control = socket.socket(fileno=fd)
    try:
        for name in preload:
            import_target(name)
    except BaseException:  # whatever a module does when imported, the controller is told
        control.sendall(json.dumps({"error": traceback.format_exc()}).encode() + b"\n")
        return 1
    processes.become_subreaper()
    gc.collect()
    gc.freeze()
    control.sendall(b'{"ready": true}\n')
    _serve(control)
    return 0


def _serve(control: socket.socket) -> None:
    """Until the controller is gone, and then until the last warden has done its work."""
    wardens: set[int] = set()
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    wakeup = processes.child_wakeup()
    selector.register(wakeup, selectors.EVENT_READ)
    closing = False
    while wardens or not closing:
        ready = {key.fileobj for key, _ in selector.select(_LAST_WAIT if closing else None)}
        if closing and not ready:
            return
        if wakeup in ready:
            wakeup.recv(4096)
            _reap(wardens)
        if control in ready:
            data, fds, _, _ = socket.recv_fds(control, 1, 1)
            if data:
                wardens.add(_fork_warden(fds[0]))
            else:
                selector.unregister(control)
                closing = True


def _fork_warden(fd: int) -> int:
    pid = os.fork()
    if pid:
        os.close(fd)
        return pid
    status = 1
    try:
        gc.disable()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        fd = processes.keep_only(fd)
        warden.run(socket.socket(fileno=fd))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _reap(wardens: set[int]) -> None:
    """Reaps wardens. Where one was killed, what it watched over is now ours to kill."""
    ended = processes.reap()
    wardens.difference_update(pid for pid, _ in ended)
    if all(code >= 0 for _, code in ended):
        return
    for pid in processes.children(os.getpid()) - wardens:
        for each in [pid, *processes.descendants(pid)]:
            processes.send(each, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), json.loads(sys.argv[2])))
