"""``agl export``: samples and calls as Parquet or JSON Lines."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import typer

from agentlightning.cli.stores import (
    GatewayOption,
    KeyOption,
    Place,
    every_rollout,
    opened,
    place,
)
from agentlightning.errors import ConfigError
from agentlightning.samples import build_samples
from agentlightning.store import Store
from agentlightning.types import Call, Json, Rollout, Sample

Row = Mapping[str, Json]

_BATCH = 500


def export(
    source: Annotated[
        str | None,
        typer.Argument(metavar="[RUN_OR_STORE]", help="Run folder or store. Default: newest run."),
    ] = None,
    *,
    format: Annotated[Literal["parquet", "jsonl"], typer.Option(help="Form of the files.")] = (
        "parquet"
    ),
    out: Annotated[Path, typer.Option(help="Folder to write to; made where missing.")] = Path(
        "export"
    ),
    gateway: GatewayOption = None,
    key: KeyOption = None,
) -> None:
    """Write samples.FORMAT (what is trained) and calls.FORMAT (what was recorded)."""
    where = _place(source, gateway, key)
    out.mkdir(parents=True, exist_ok=True)
    counts = asyncio.run(_export(where, out, _parquet if format == "parquet" else _jsonl))
    for name in ("samples", "calls"):
        typer.echo(f"{out / name}.{format}  {counts[name]} rows")


def _place(source: str | None, gateway: str | None, key: str | None) -> Place:
    if source is not None and Path(source).is_dir():
        return place(None, Path(source), gateway, key)
    return place(source, None, gateway, key)


class Writer(Protocol):
    def write(self, rows: list[Row]) -> None: ...

    def close(self) -> None: ...


async def _export(
    where: Place, out: Path, writer: Callable[[Path, Mapping[str, str]], Writer]
) -> Counter[str]:
    counts: Counter[str] = Counter(samples=0, calls=0)
    writers = {name: writer(out / name, columns) for name, columns in _COLUMNS.items()}
    pending: dict[str, list[Row]] = {name: [] for name in writers}
    try:
        async with opened(where) as store:
            async for name, row in _rows(store):
                counts[name] += 1
                pending[name].append(row)
                if len(pending[name]) == _BATCH:
                    writers[name].write(pending[name])
                    pending[name] = []
        for name, rows in pending.items():
            writers[name].write(rows)
    finally:
        for each in writers.values():
            each.close()
    return counts


async def _rows(store: Store) -> AsyncIterator[tuple[str, Row]]:
    async for rollout in every_rollout(store):
        calls = await store.calls(rollout.rollout_id)
        for call in calls:
            for index in range(len(call.completions) or 1):
                yield "calls", _call_row(call, index)
        for number, sample in zip(count(), build_samples(rollout, calls).samples, strict=False):
            yield "samples", _sample_row(rollout, number, sample)


def _sample_row(rollout: Rollout, number: int, sample: Sample) -> Row:
    arrays = {each.name: getattr(sample, each.name) for each in fields(sample)}
    lists = {name: a.tolist() if hasattr(a, "tolist") else a for name, a in arrays.items()}
    return {**lists, "sample": number, "mode": rollout.mode, "state": rollout.state}


def _call_row(call: Call, index: int) -> Row:
    plain = {name: getattr(call, name) for name in _CALL_COLUMNS if hasattr(call, name)}
    row: dict[str, Any] = {
        **plain,
        "prompt_ids": call.prompt_ids.tolist(),
        "sampling": json.dumps(dict(call.sampling)),
        "parent": call.parent.call_id if call.parent else None,
        "completion": index,
        "token_ids": [],
        "logprobs": None,
        "finish_reason": None,
    }
    if index < len(call.completions):
        completion = call.completions[index]
        row["token_ids"] = completion.token_ids.tolist()
        row["logprobs"] = None if completion.logprobs is None else completion.logprobs.tolist()
        row["finish_reason"] = completion.finish_reason
    return row


_SAMPLE_COLUMNS = {
    "rollout_id": "text",
    "group_id": "text",
    "sample": "integer",
    "mode": "text",
    "state": "text",
    "reward": "float",
    "token_ids": "integers",
    "loss_mask": "integers",
    "rollout_logprobs": "floats",
    "policy_versions": "integers",
}
_CALL_COLUMNS = {
    "call_id": "text",
    "rollout_id": "text",
    "attempt_id": "text",
    "sequence": "integer",
    "completion": "integer",
    "parent": "text",
    "dialect": "text",
    "requested_model": "text",
    "model": "text",
    "upstream": "text",
    "sampling": "text",
    "version_start": "integer",
    "version_end": "integer",
    "status": "text",
    "trainable": "boolean",
    "reason": "text",
    "error": "text",
    "prompt_ids": "integers",
    "token_ids": "integers",
    "logprobs": "floats",
    "finish_reason": "text",
    "started_at": "float",
    "ended_at": "float",
}
_COLUMNS = {"samples": _SAMPLE_COLUMNS, "calls": _CALL_COLUMNS}


class _JsonLines:
    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        self._columns = columns
        self._file = path.with_suffix(".jsonl").open("w", encoding="utf-8")

    def write(self, rows: list[Row]) -> None:
        for row in rows:
            self._file.write(json.dumps({name: row[name] for name in self._columns}) + "\n")

    def close(self) -> None:
        self._file.close()


class _Parquet:
    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ModuleNotFoundError as error:
            raise ConfigError(
                "Parquet needs pyarrow. Install agentlightning[train], or give --format jsonl."
            ) from error
        types = {
            "text": pyarrow.string(),
            "integer": pyarrow.int64(),
            "float": pyarrow.float64(),
            "boolean": pyarrow.bool_(),
            "integers": pyarrow.list_(pyarrow.int32()),
            "floats": pyarrow.list_(pyarrow.float32()),
        }
        self._schema = pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])
        self._table = pyarrow.Table
        self._file = parquet.ParquetWriter(path.with_suffix(".parquet"), self._schema)

    def write(self, rows: list[Row]) -> None:
        if rows:
            self._file.write_table(self._table.from_pylist(rows, schema=self._schema))

    def close(self) -> None:
        self._file.close()


def _jsonl(path: Path, columns: Mapping[str, str]) -> Writer:
    return _JsonLines(path, columns)


def _parquet(path: Path, columns: Mapping[str, str]) -> Writer:
    return _Parquet(path, columns)
