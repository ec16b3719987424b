"""How commands print: tables on a terminal, plain aligned lines in a pipe."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 10_000  # nothing is wrapped or cut where no terminal limits a line


def console() -> Console:
    """Standard output; without colour and width limit unless it is a terminal."""
    out = Console(highlight=False, soft_wrap=True)
    return out if out.is_terminal else Console(highlight=False, width=_PIPE_WIDTH, no_color=True)


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Left-aligned columns; the first one is never shortened."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for position, header in enumerate(headers):
        table.add_column(header, no_wrap=True, overflow="fold" if position == 0 else "ellipsis")
    count = 0
    for row in rows:
        table.add_row(*[Text(cell) for cell in row])
        count += 1
    out = console()
    if count:
        out.print(table, soft_wrap=not out.is_terminal)
    else:
        out.print("none")


def age(seconds: float) -> str:
    """A duration for people.

    Example:
        >>> age(12.3), age(150), age(7300)
        ('12 s', '2 min', '2 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def since(then: float | None) -> str:
    """Time since a Unix time, or a dash."""
    return age(max(0.0, time.time() - then)) if then else "-"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
