"""``python -m agentlightning`` is ``agl``."""

from agentlightning.cli import main

main()
