"""What all services share."""

from __future__ import annotations

import ctypes
import subprocess
import sys

PROGRAM = """
import ctypes
from agentlightning.serving import hide_from_agents
hide_from_agents()
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
"""


def test_a_service_is_not_dumpable() -> None:
    """Not dumpable: its /proc/PID/environ and /proc/PID/mem are root's alone."""
    assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 1
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    assert run.stdout == b"0\n"
