"""Processes by number: what Linux offers to own, find and end them. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections import defaultdict

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FIRST_FD = 3


def become_subreaper() -> None:
    """Descendants that lose their parent become our children, so that none can slip away."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """This process gets SIGKILL when ``parent`` ends; ends at once if that was before."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def child_wakeup() -> socket.socket:
    """A socket that becomes readable when a child ends."""
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reading


def keep_only(fd: int) -> int:
    """Closes every descriptor but 0, 1, 2 and ``fd``; returns the new number of ``fd``."""
    os.dup2(fd, _FIRST_FD, inheritable=False)
    os.closerange(_FIRST_FD + 1, os.sysconf("SC_OPEN_MAX"))
    return _FIRST_FD


def reap() -> list[tuple[int, int]]:
    """``(pid, exit code)`` of children that ended; a code below 0 is a signal."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def have_children() -> bool:
    """Whether any child, ended or not, is left to wait for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def children(pid: int) -> set[int]:
    """Direct children of a process."""
    return set(_tree().get(pid, ()))


def descendants(pid: int) -> list[int]:
    """Everything below a process, parents before children."""
    tree, found = _tree(), []
    todo = list(tree.get(pid, ()))
    while todo:
        found.append(todo.pop(0))
        todo.extend(tree.get(found[-1], ()))
    return found


def send(pid: int, signum: int) -> None:
    """Sends a signal; a process that is gone is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def _tree() -> dict[int, list[int]]:
    """Parent → children, of every process that /proc shows."""
    tree: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as f:
            # The command's name stands in parentheses and may hold any character.
            tree[int(f.read().rpartition(")")[2].split()[1])].append(int(name))
    return tree


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")
