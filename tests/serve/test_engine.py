from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from agentlightning.errors import ModelError, ServiceError
from agentlightning.trainer.serve.engine import Engine
from agentlightning.trainer.serve.sampler import Sampling, processed_logprobs
from tests.fakes.tiny_model import save_tiny_model
from tests.serve.conftest import Answer, random_prompt, submit

pytestmark = pytest.mark.slow

MakeEngine = Callable[..., Engine]
FREE = Sampling(temperature=1.0)


def greedy_reference(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(  # type: ignore[operator]
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
    )
    return [int(i) for i in out[0, len(prompt) :]]


def recomputed(model: torch.nn.Module, answer: Answer, sampling: Sampling) -> list[float]:
    prompt, tokens = answer.sequence.prompt.tolist(), answer.tokens
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    rows = processed_logprobs(logits, [sampling] * len(tokens))
    return rows.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def test_greedy_equals_generate_while_others_join_and_leave(
    make_engine: MakeEngine, reference: torch.nn.Module
) -> None:
    engine = make_engine(running=4)
    first = submit(engine, random_prompt(9, 0), max_tokens=30)
    first.take(5)
    short = [submit(engine, random_prompt(3 + i, i), max_tokens=2 + i) for i in range(6)]
    late = submit(engine, random_prompt(120, 50), max_tokens=20)
    for answer in [first, *short, late]:
        answer.wait()
        expected = greedy_reference(
            reference, answer.sequence.prompt.tolist(), answer.sequence.max_tokens
        )
        assert answer.tokens == expected
        assert answer.steps[-1].finish == "length"


@pytest.mark.parametrize(
    "sampling",
    [
        FREE,
        Sampling(temperature=0.7),
        Sampling(temperature=1.3, top_p=0.8),
        Sampling(temperature=0.9, top_k=5),
        Sampling(temperature=0.7, top_p=0.9, top_k=20),
        Sampling(temperature=1.0, logit_bias={3: 2.5, 4: -100.0}),
    ],
)
def test_logprobs_are_of_what_was_sampled_from(
    make_engine: MakeEngine, reference: torch.nn.Module, sampling: Sampling
) -> None:
    engine = make_engine()
    answers = [submit(engine, random_prompt(20, i), sampling=sampling, seed=i) for i in range(5)]
    for answer in answers:
        answer.wait()
        assert answer.logprobs == pytest.approx(recomputed(reference, answer, sampling), abs=1e-4)


def test_a_cached_prefix_changes_no_token_and_no_logprob(make_engine: MakeEngine) -> None:
    engine = make_engine()
    turn1 = submit(engine, random_prompt(40, 1), sampling=FREE, seed=3).wait()
    turn2_prompt = random_prompt(40, 1) + turn1.tokens + random_prompt(7, 2)
    warm = submit(engine, turn2_prompt, sampling=FREE, seed=4).wait()
    cold = submit(make_engine(), turn2_prompt, sampling=FREE, seed=4).wait()
    # The last sampled token was never fed to the model: all before it is reused.
    assert warm.sequence.cached == 40 + len(turn1.tokens) - 1
    assert cold.sequence.cached == 0
    assert warm.tokens == cold.tokens
    assert warm.logprobs == pytest.approx(cold.logprobs, abs=1e-5)


def test_equal_prompts_that_arrive_together_are_computed_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = random_prompt(100, 1)
    answers = [submit(engine, prompt, sampling=FREE, seed=i) for i in range(8)]
    cached = sorted(answer.wait().sequence.cached for answer in answers)
    assert cached == [0] + [99] * 7
    assert len({tuple(answer.tokens) for answer in answers}) == 8


def test_the_same_seed_gives_the_same_answer_among_other_mates(make_engine: MakeEngine) -> None:
    alone = submit(make_engine(), random_prompt(30, 1), sampling=FREE, seed=11).wait()
    engine = make_engine()
    mates = [submit(engine, random_prompt(20 + i, i), sampling=FREE) for i in range(5)]
    among = submit(engine, random_prompt(30, 1), sampling=FREE, seed=11).wait()
    assert among.tokens == alone.tokens
    for mate in mates:
        mate.wait()


def test_too_small_a_cache_preempts_and_changes_nothing(
    make_engine: MakeEngine, reference: torch.nn.Module
) -> None:
    engine = make_engine(cache=130)
    answers = [submit(engine, random_prompt(20, i), max_tokens=40) for i in range(5)]
    for answer in answers:
        expected = greedy_reference(reference, answer.sequence.prompt.tolist(), 40)
        assert answer.wait().tokens == expected
    assert engine.stats.preemptions > 0


def test_cached_prefixes_make_room_for_new_prompts(make_engine: MakeEngine) -> None:
    engine = make_engine(cache=128)
    for i in range(12):
        submit(engine, random_prompt(60, i), max_tokens=4).wait()
    again = submit(engine, random_prompt(60, 11), max_tokens=4).wait()
    assert again.sequence.cached == 59
    assert engine.rows_used <= 128


def test_after_new_weights_nothing_of_the_old_ones_is_left(
    make_engine: MakeEngine, other_folder: Path
) -> None:
    engine = make_engine()
    prompt = random_prompt(50, 1)
    old = submit(engine, prompt).wait()
    engine.update_weights(other_folder, 5).result(20)
    new = submit(engine, prompt).wait()
    fresh = submit(make_engine(other_folder), prompt).wait()
    assert new.sequence.cached == 0
    assert new.tokens == fresh.tokens != old.tokens
    assert new.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)
    assert set(new.versions) == {5}


def test_a_request_in_flight_goes_on_and_its_tokens_say_who_sampled_them(
    make_engine: MakeEngine, other_folder: Path
) -> None:
    engine = make_engine()
    prompt = random_prompt(10, 1)
    answer = submit(engine, prompt, max_tokens=200)
    answer.take(5)
    engine.update_weights(other_folder, 1).result(20)
    answer.wait()
    assert len(answer.tokens) == 200
    assert sorted(answer.versions) == answer.versions
    assert set(answer.versions) == {0, 1}
    # It was begun with the old weights: its keys and values are offered to nobody.
    assert submit(engine, prompt + answer.tokens[:50]).wait().sequence.cached == 0


def test_weights_of_another_shape_are_refused_and_change_nothing(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine()
    before = submit(engine, random_prompt(10, 1)).wait()
    small = save_tiny_model(tmp_path / "small", hidden=16)
    with pytest.raises(ModelError, match="do not fit the served model"):
        engine.update_weights(small, 1).result(20)
    assert engine.version == 0
    assert submit(engine, random_prompt(10, 1)).wait().tokens == before.tokens


def test_an_aborted_sequence_frees_its_slot(make_engine: MakeEngine) -> None:
    engine = make_engine(running=1)
    long = submit(engine, random_prompt(10, 1), max_tokens=240)
    waiting = submit(engine, random_prompt(10, 2), max_tokens=240)
    long.take(2)
    engine.abort(waiting.sequence)
    engine.abort(long.sequence)
    assert long.wait().steps[-1].finish == "abort"
    assert waiting.wait().steps[-1].finish == "abort"
    assert len(long.tokens) < 240
    assert waiting.tokens == []
    assert len(submit(engine, random_prompt(10, 3)).wait().tokens) == 12
    assert (engine.running, engine.waiting) == (0, 0)


def test_close_ends_open_sequences_and_refuses_new_ones(make_engine: MakeEngine) -> None:
    engine = make_engine()
    answer = submit(engine, random_prompt(10, 1), max_tokens=240)
    answer.take(1)
    engine.close()
    assert answer.wait().steps[-1].finish == "abort"
    with pytest.raises(ServiceError, match="has ended"):
        submit(engine, random_prompt(10, 1))
