"""Runs an ASGI application until SIGTERM or SIGINT: what all our servers share."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any

import uvicorn

from agentlightning.errors import ServiceError

LISTEN_FD = "AGL_LISTEN_FD"
"""Variable with the number of a listening socket that was inherited from the parent."""

_PR_SET_DUMPABLE = 4


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening TCP socket: the inherited one where there is one, else a new one;
    port 0 picks a free one."""
    if inherited := os.environ.pop(LISTEN_FD, None):
        return socket.socket(fileno=int(inherited))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ServiceError(
            f"cannot listen on {host}:{port}: {error.strerror}. "
            "Choose another --port (0 picks a free one) or end what uses it."
        ) from error
    return sock


def inherited(fd: int) -> socket.socket:
    """The listening socket that our parent bound and keeps: it outlives a restart."""
    try:
        return socket.socket(fileno=fd)
    except OSError as error:
        raise ServiceError(f"file descriptor {fd} is not a socket: {error.strerror}.") from error


def bound_url(sock: socket.socket) -> str:
    """``http://host:port`` of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve_app(app: Any, sock: socket.socket, *, name: str) -> None:
    """Serves ``app`` on ``sock``; prints ``{name} listening on URL`` once it is ready.

    Returns after SIGTERM or SIGINT, when the application's lifespan has ended, so the process
    can exit with 0. Open requests get five seconds; a second SIGINT cuts them off.
    """
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        interface="asgi3",
        proxy_headers=False,
        lifespan="on",
        ws="none",
        access_log=False,
        server_header=False,
        date_header=False,
        log_config=None,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        backlog=2048,
    )
    _Server(config, f"{name} listening on {bound_url(sock)}").run(sockets=[sock])


def end_with_parent() -> None:
    """Where AGL_PARENT names our parent process, ends us (SIGTERM) once it is gone.

    A service that was started by another of our processes must not outlive it, however that
    ended. Polling the parent's id works on every Unix.
    """
    parent = os.environ.pop("AGL_PARENT", None)
    if parent is not None:
        threading.Thread(target=_watch_parent, args=(int(parent),), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


def hide_from_agents() -> None:
    """Takes our memory and environment, and with them the admin key, out of the reach of other
    processes of our user (Linux; root still reads all)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def configure_logging(level: str = "INFO") -> None:
    """Logs to standard error, one line a record."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )


class _Server(uvicorn.Server):
    """Says where it listens, and ends like any other program that was asked to."""

    def __init__(self, config: uvicorn.Config, announcement: str) -> None:
        super().__init__(config)
        self._announcement = announcement

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self._announcement, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        # uvicorn's own notes the signal and raises it again at the end, so that a process which
        # shut down in order would still be one that a signal killed.
        self.force_exit = self.force_exit or (self.should_exit and sig == signal.SIGINT)
        self.should_exit = True
