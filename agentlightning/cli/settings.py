"""``agl config``: every setting, documented from its own description in config.py."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from agentlightning.config import Config, Section, load_config

app = typer.Typer(help="Document and check settings.", no_args_is_help=True)

_HEAD = """# Configuration

One YAML file, and `key=value` on the command line over it: `agl train run.yaml trainer.updates=20`.
An unknown key is an error that names the nearest known one. Durations are seconds, or text such as
`250ms`, `60s`, `5m`, `1h`.

This page is generated from `agentlightning/config.py` by `make docs`.
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the tree, as it is documented.

    Example:
        >>> next(s for s in every_setting() if s.key == "trainer.updates").default
        '12'
    """

    key: str
    type: str
    default: str
    description: str


@app.command("docs")
def docs() -> None:
    """Print docs/configuration.md."""
    typer.echo(markdown(), nl=False)


@app.command("keys")
def keys() -> None:
    """Print every key with its default and description."""
    typer.echo(epilog())


@app.command("check")
def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings over the file's.")
    ] = None,
) -> None:
    """Check a file and overrides, and print what results."""
    from omegaconf import OmegaConf

    tree = load_config(config, overrides or []).model_dump(mode="json")
    if tree["gateway"]["key"]:
        tree["gateway"]["key"] = "(set)"
    typer.echo(OmegaConf.to_yaml(OmegaConf.create(tree)), nl=False)


def every_setting(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[Setting]:
    """The leaves of the tree, in order."""
    for name, field in section.model_fields.items():
        child = _section(field.annotation)
        if child is not None:
            yield from every_setting(child, f"{prefix}{name}.")
        else:
            yield Setting(prefix + name, _type(field), _default(field), _sentence(field))


def epilog() -> str:
    """The settings as text for ``--help``; paragraphs, since help text is re-wrapped."""
    lines = [
        f"{each.key} ({each.type}, {each.default}): {each.description}".rstrip(": ")
        for each in every_setting()
    ]
    return "\n\n".join(["Settings:", *lines])


def markdown() -> str:
    """docs/configuration.md: a table for each section of the tree."""
    parts = [_HEAD]
    for name, section in _sections(Config, ""):
        leaves = [each for each in every_setting(section, name) if "." not in each.key[len(name) :]]
        parts.append(f"## {name.rstrip('.') or 'Top level'}\n")
        parts.append(f"{' '.join((section.__doc__ or '').split())}\n")
        parts.append("| key | type | default | |\n|---|---|---|---|")
        parts.append("".join(_row(each) for each in leaves))
    return "\n".join(parts).rstrip() + "\n"


def _row(setting: Setting) -> str:
    cells = (f"`{setting.key}`", setting.type, f"`{setting.default}`", setting.description)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _sections(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield prefix, section
    for name, field in section.model_fields.items():
        child = _section(field.annotation)
        if child is not None:
            yield from _sections(child, f"{prefix}{name}.")


def _section(annotation: Any) -> type[Section] | None:
    for part in get_args(annotation) or (annotation,):
        if isinstance(part, type) and issubclass(part, Section):
            return part
    return None


def _type(field: FieldInfo) -> str:
    bounds = [str(each) for each in field.metadata]
    if any("BeforeValidator" in each for each in bounds):
        return "duration"
    return _type_name(field.annotation)


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{each}`" for each in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(each) for each in arguments)
    if origin is not None:
        inner = ", ".join(_type_name(each) for each in arguments)
        return f"{origin.__name__} of {inner}"
    names = {
        "str": "text",
        "int": "whole number",
        "float": "number",
        "bool": "true or false",
        "NoneType": "null",
        "Path": "path",
    }
    return names.get(getattr(annotation, "__name__", ""), str(annotation))


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    value = str(field.default) if isinstance(field.default, Path) else field.default
    return value if isinstance(value, str) else json.dumps(value)


def _sentence(field: FieldInfo) -> str:
    limits = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    bounds = [
        f"{word} {getattr(each, name):g}"
        for each in field.metadata
        for name, word in limits.items()
        if hasattr(each, name)
    ]
    text = field.description or ""
    return f"{text} ({', '.join(bounds)})" if bounds else text
