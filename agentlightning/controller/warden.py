"""One process beside each agent: starts it, keeps its output, ends all of it.

A warden adopts whatever the agent's processes leave behind (they cannot leave by setsid or
a double fork), so "the agent is gone" is a fact when it says so. It reads its
:class:`ProcessSpec` as one JSON line from its socket, then ``{"kill": grace_seconds}``; it
writes ``{"exit_code": n}`` (below 0: a signal) or ``{"launch_error": text}`` once no process
of the agent is left. When the socket closes, the controller is gone: everything is killed
at once.

Output: the first half of ``output_limit`` bytes goes to the file as it comes, of the rest
the last half is kept and written at the end, with a line between that counts what was left
out. A program that prints a gigabyte neither fills the disk nor blocks.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any

from agentlightning.controller import child, processes

_KILL_WAIT = 5.0
"""Longest wait, in seconds, for processes that got SIGKILL."""


def run(control: socket.socket) -> None:
    """Serves one agent from its start to its end."""
    lines = _Lines(control)
    spec = lines.next(wait=True)
    if spec is None:
        return
    processes.become_subreaper()
    report = _Warden(lines, spec).run()
    with contextlib.suppress(OSError):  # the controller is gone
        control.sendall(json.dumps(report).encode() + b"\n")


class Output:
    """A file that holds the head and the tail of a stream, at most ``limit`` bytes."""

    def __init__(self, path: str, limit: int) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        self._head_left = limit - limit // 2
        self._tail_limit = limit // 2
        self._tail = bytearray()
        self._dropped = 0

    def write(self, data: bytes) -> None:
        if self._head_left:
            self._file.write(data[: self._head_left])
            data, self._head_left = data[self._head_left :], max(0, self._head_left - len(data))
        self._tail += data
        # Cutting only at twice the size keeps the cost of a byte constant.
        if len(self._tail) > 2 * self._tail_limit:
            self._cut()

    def close(self) -> None:
        self._cut()
        if self._dropped:
            self._file.write(b"\n[%d bytes left out here: output_limit]\n" % self._dropped)
        self._file.write(self._tail)
        self._file.close()

    def _cut(self) -> None:
        extra = len(self._tail) - self._tail_limit
        if extra > 0:
            del self._tail[:extra]
            self._dropped += extra


class _Warden:
    def __init__(self, lines: _Lines, spec: Mapping[str, Any]) -> None:
        self._lines = lines
        self._spec = spec
        self._selector = selectors.DefaultSelector()
        self._deadline: float | None = None  # when what is left gets SIGKILL
        self._exit_code: int | None = None
        self._launch_error = b""

    def run(self) -> dict[str, Any]:
        wakeup = processes.child_wakeup()
        self._watch(wakeup, lambda: wakeup.recv(4096))
        outputs = self._start()
        self._watch(self._lines.sock, self._on_control)
        self._on_control()  # an order may have come along with the specification
        while not self._over():
            timeout = (
                None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            )
            for key, _ in self._selector.select(timeout):
                key.data()
        self._kill_rest()
        self._drain(outputs)
        self._on_status()
        if self._launch_error:
            return {"launch_error": self._launch_error.decode(errors="replace")}
        return {"exit_code": self._exit_code}

    def _over(self) -> bool:
        """The agent ended by itself, or after a kill: nothing is left, or the grace is over."""
        for pid, code in processes.reap():
            if pid == self._pid:
                self._exit_code = code
        if self._deadline is None:
            return self._exit_code is not None
        return time.monotonic() >= self._deadline or not processes.have_children()

    def _start(self) -> dict[int, Output]:
        limit = self._spec["output_limit"]
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        status, status_end = os.pipe()
        warden = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            child.main(self._spec, stdout=out_end, stderr=err_end, status=status_end, parent=warden)
        for fd in (out_end, err_end, status_end):
            os.close(fd)
        outputs = {
            out: Output(self._spec["stdout"], limit),
            err: Output(self._spec["stderr"], limit),
        }
        for fd, output in outputs.items():
            os.set_blocking(fd, False)
            self._watch(fd, lambda fd=fd, output=output: self._copy(fd, output))
        self._status = status
        os.set_blocking(status, False)
        self._watch(status, self._on_status)
        return outputs

    def _watch(self, source: Any, callback: Any) -> None:
        self._selector.register(source, selectors.EVENT_READ, callback)

    def _on_status(self) -> None:
        """Why the agent could not start; the end of this pipe says that it did."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._status, 65536)
            self._launch_error += data
            if not data and self._status in self._selector.get_map():
                self._selector.unregister(self._status)

    def _copy(self, fd: int, output: Output) -> bool:
        """Copies what is there; False at the end of the stream or when nothing is there."""
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return False
        if data:
            output.write(data)
        elif fd in self._selector.get_map():
            self._selector.unregister(fd)
        return bool(data)

    def _on_control(self) -> None:
        order = self._lines.next(wait=False)
        if self._lines.closed:
            self._selector.unregister(self._lines.sock)
            self._deadline = time.monotonic()
        elif order is not None:
            self._deadline = time.monotonic() + order["kill"]
            for pid in processes.descendants(os.getpid()):
                processes.send(pid, signal.SIGTERM)

    def _kill_rest(self) -> None:
        """SIGKILL to whatever is left, until nothing is."""
        deadline = time.monotonic() + _KILL_WAIT
        while processes.have_children() and time.monotonic() < deadline:
            for pid in processes.descendants(os.getpid()):
                processes.send(pid, signal.SIGKILL)
            time.sleep(0.002)
            self._over()

    def _drain(self, outputs: Mapping[int, Output]) -> None:
        for fd, output in outputs.items():
            while self._copy(fd, output):
                pass
            output.close()


class _Lines:
    """JSON lines from a socket; ``closed`` once the other side is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.closed = False
        self._buffer = b""

    def next(self, *, wait: bool) -> Any:
        """The next line's value; None where the socket closed or, without ``wait``, where
        no whole line is there."""
        while b"\n" not in self._buffer:
            try:
                data = self.sock.recv(65536, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError:
                data = b""
            if not data:
                self.closed = True
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)
