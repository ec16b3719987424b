"""``agl calls`` and ``agl samples``: what was recorded of a rollout, what would be trained."""

from __future__ import annotations

from typing import Annotated

import typer

from agentlightning.cli.output import number, print_table
from agentlightning.cli.rollouts import RolloutId
from agentlightning.cli.stores import (
    GatewayOption,
    KeyOption,
    RunOption,
    StoreOption,
    find_rollout,
    place,
    with_store,
)
from agentlightning.samples import build_samples
from agentlightning.store import Store
from agentlightning.types import Call, Rollout, Sample

Ids = Annotated[bool, typer.Option("--ids", help="Print the token ids too.")]


def calls(
    rollout: RolloutId,
    *,
    ids: Ids = False,
    store: StoreOption = None,
    run: RunOption = None,
    gateway: GatewayOption = None,
    key: KeyOption = None,
) -> None:
    """List the model calls of a rollout, with the reason where one is not trainable."""
    _, found = with_store(
        place(store, run, gateway, key), lambda opened: _rollout_and_calls(opened, rollout)
    )
    headers = [
        "call",
        "attempt",
        "no.",
        "dialect",
        "model",
        "prompt",
        "sampled",
        "version",
        "finish",
        "seconds",
        "status",
        "trainable",
    ]
    print_table(headers, [_call_row(call) for call in found])
    for call in found if ids else ():
        typer.echo(f"{call.call_id} prompt {call.prompt_ids.tolist()}")
        for completion in call.completions:
            typer.echo(f"{call.call_id} sampled {completion.token_ids.tolist()}")


def samples(
    rollout: RolloutId,
    *,
    ids: Ids = False,
    store: StoreOption = None,
    run: RunOption = None,
    gateway: GatewayOption = None,
    key: KeyOption = None,
) -> None:
    """Show the samples that a rollout gives, and what of its calls is left out."""
    found, recorded = with_store(
        place(store, run, gateway, key), lambda opened: _rollout_and_calls(opened, rollout)
    )
    made = build_samples(found, recorded)
    headers = ["sample", "tokens", "trained", "versions", "logprob (mean)", "reward"]
    print_table(headers, [_sample_row(n, sample) for n, sample in enumerate(made.samples)])
    for name, count in sorted(made.counts.items()):
        typer.echo(f"{name} {count}")
    for number_, sample in enumerate(made.samples if ids else ()):
        typer.echo(f"{number_} token_ids {sample.token_ids.tolist()}")
        typer.echo(f"{number_} loss_mask {sample.loss_mask.tolist()}")


async def _rollout_and_calls(store: Store, text: str) -> tuple[Rollout, list[Call]]:
    rollout = await find_rollout(store, text)
    return rollout, await store.calls(rollout.rollout_id)


def _call_row(call: Call) -> tuple[str, ...]:
    sampled = "+".join(str(len(each.token_ids)) for each in call.completions) or "0"
    finish = ",".join(each.finish_reason or "-" for each in call.completions) or "-"
    return (
        call.call_id,
        call.attempt_id,
        str(call.sequence),
        call.dialect,
        call.requested_model or call.model,
        str(len(call.prompt_ids)),
        sampled,
        _versions(call.version_start, call.version_end),
        finish,
        f"{call.ended_at - call.started_at:.2f}",
        call.status,
        "yes" if call.trainable else f"no: {call.reason}",
    )


def _versions(start: int | None, end: int | None) -> str:
    if start is None:
        return "-"
    return str(start) if end in (start, None) else f"{start}-{end}"


def _sample_row(number_: int, sample: Sample) -> tuple[str, ...]:
    trained = [i for i, mask in enumerate(sample.loss_mask) if mask]
    versions = sorted({sample.policy_versions[i] for i in trained})
    mean = sum(sample.rollout_logprobs[i] for i in trained) / max(1, len(trained))
    return (
        str(number_),
        str(len(sample.token_ids)),
        str(len(trained)),
        ",".join(map(str, versions)) or "-",
        f"{mean:.3f}",
        number(sample.reward),
    )
