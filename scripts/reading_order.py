"""Prints the order in which to read the package, with the lines of code of each file.

    python scripts/reading_order.py                 # as a table on stdout
    python scripts/reading_order.py --write FILE    # between the markers in FILE

Lines of code are those that bear code: no blank lines, comments or docstrings.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent / "agentlightning"
ROOMS = (
    ("the nouns", ("types.py", "errors.py", "config.py")),
    ("helpers", ("address.py", "credentials.py", "prefix.py", "serving.py")),
    ("store", ("store",)),
    ("gateway", ("gateway",)),
    ("controller", ("controller",)),
    ("calls to samples to loss", ("samples.py", "advantages.py", "losses.py")),
    ("trainer", ("trainer",)),
    ("embedded model server", ("trainer/serve",)),
    ("command line", ("cli",)),
)
_BEGIN, _END = "<!-- reading order: begin -->", "<!-- reading order: end -->"
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(source: str) -> int:
    """Lines that bear code.

    Example:
        >>> code_lines('"doc"\\n\\n# why\\nx = 1\\n')
        1
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - _docstring_lines(source))


def _docstring_lines(source: str) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        for statement in _body(node):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                lines.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return lines


def _body(node: ast.AST) -> list[ast.stmt]:
    body = getattr(node, "body", [])
    return body if isinstance(body, list) else []  # a lambda's body is one expression


def files_of(entries: tuple[str, ...]) -> list[Path]:
    """The Python files of a room; a folder below that is a room of its own is left out."""
    own = {ROOT / entry for _, each in ROOMS for entry in each}
    found: list[Path] = []
    for entry in entries:
        path = ROOT / entry
        inside = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        deeper = {other for other in own if path in other.parents}
        found += [file for file in inside if not deeper & set(file.parents)]
    return [file for file in found if file.name != "__init__.py" or code_lines(file.read_text())]


def table() -> str:
    rows = ["| room | file | lines of code |", "|---|---|---:|"]
    for room, entries in ROOMS:
        counts = {file: code_lines(file.read_text()) for file in files_of(entries)}
        rows.append(f"| **{room}** | | **{sum(counts.values()):,}** |")
        rows += [f"| | `{f.relative_to(ROOT.parent)}` | {n} |" for f, n in counts.items()]
    return "\n".join(rows)


def written(text: str) -> str:
    """``text`` with the table between its markers."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{table()}\n{_END}{after}"


def main() -> None:
    if sys.argv[1:2] == ["--write"]:
        page = Path(sys.argv[2])
        page.write_text(written(page.read_text()))
    else:
        print(table())


if __name__ == "__main__":
    main()
