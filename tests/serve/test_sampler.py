from __future__ import annotations

import random

import pytest
import torch

from agentlightning.trainer.serve.sampler import Sampling, draw, processed_logprobs

pytestmark = pytest.mark.slow

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def probabilities(sampling: Sampling) -> list[float]:
    return processed_logprobs(LOGITS[None], [sampling]).exp()[0].tolist()


def test_temperature_divides_the_logits() -> None:
    expected = torch.softmax(LOGITS / 0.5, -1).tolist()
    assert probabilities(Sampling(temperature=0.5)) == pytest.approx(expected, abs=1e-6)


def test_top_k_then_top_p_over_what_is_left() -> None:
    kept = torch.softmax(LOGITS[:3], -1)  # 0.63, 0.23, 0.14
    expected = [*(kept[:2] / kept[:2].sum()).tolist(), 0, 0, 0, 0]
    assert probabilities(Sampling(top_k=3, top_p=0.8)) == pytest.approx(expected, abs=1e-6)


def plainly_restricted(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """top_k, then top_p over the whole sorted vocabulary, in double precision."""
    probs, order = (logits.double() / sampling.temperature).softmax(-1).sort(descending=True)
    if sampling.top_k > 0:
        probs[sampling.top_k :] = 0
    probs /= probs.sum()
    probs[probs.cumsum(-1) - probs >= sampling.top_p] = 0
    return torch.zeros_like(probs).scatter(0, order, probs / probs.sum())


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0], ids=["near uniform", "wide", "peaked"])
def test_a_large_vocabulary_is_restricted_as_if_it_were_sorted(spread: float) -> None:
    samplings = [
        Sampling(top_p=0.5),
        Sampling(top_p=0.95, temperature=0.7),
        Sampling(top_k=2000),
        Sampling(top_k=20, top_p=0.9),
        Sampling(top_k=9000, temperature=2),
    ]
    logits = torch.randn(5, 5000, generator=torch.Generator().manual_seed(1)) * spread
    for batch in [samplings, *([each] for each in samplings)]:
        rows = processed_logprobs(logits[: len(batch)], batch).exp()
        for row, its_logits, sampling in zip(rows, logits, batch, strict=False):
            expected = plainly_restricted(its_logits, sampling)
            # One token at the very edge may fall either way in single precision.
            assert int(((row > 0) != (expected > 0)).sum()) <= 1
            assert (row - expected).abs().max() < 1e-3


def test_the_likeliest_token_always_stays() -> None:
    assert probabilities(Sampling(top_p=1e-6)) == [1, 0, 0, 0, 0, 0]


def test_greedy_reports_temperature_one_and_ignores_top_p() -> None:
    [drawn] = draw(LOGITS[None], [Sampling(temperature=0, top_p=0.1)], [0.999])
    assert drawn.token == 0
    assert drawn.logprob == pytest.approx(torch.log_softmax(LOGITS, -1)[0].item())


def test_rows_of_a_batch_keep_to_their_own_parameters() -> None:
    logits = LOGITS.repeat(3, 1)
    samplings = [Sampling(top_k=2), Sampling(logit_bias={5: 50.0}), Sampling(temperature=2)]
    rows = processed_logprobs(logits, samplings).exp()
    assert [int((row > 0).sum()) for row in rows] == [2, 6, 6]
    assert rows[1, 5] == pytest.approx(1.0)
    assert torch.equal(logits, LOGITS.repeat(3, 1))


def test_a_draw_at_either_end_of_the_unit_interval_can_be_drawn() -> None:
    sampling = Sampling(top_k=2)
    for uniform in (0.0, 0.5, 1 - 2**-53):
        [drawn] = draw(LOGITS[None].flip(1), [sampling], [uniform])
        assert drawn.token in (4, 5)


def test_alternatives_are_the_likeliest_in_order() -> None:
    first, second = draw(
        LOGITS.repeat(2, 1), [Sampling(top_logprobs=3), Sampling(top_logprobs=1)], [0.1, 0.2]
    )
    assert [token for token, _ in first.top] == [0, 1, 2]
    assert [logprob for _, logprob in first.top] == pytest.approx(
        torch.log_softmax(LOGITS, -1)[:3].tolist()
    )
    assert len(second.top) == 1


def test_frequencies_match_probabilities() -> None:
    rng, count = random.Random(0), 20_000
    sampling = Sampling(temperature=0.8, top_k=5)
    expected = probabilities(sampling)
    drawn = draw(LOGITS.repeat(count, 1), [sampling] * count, [rng.random() for _ in range(count)])
    seen = torch.bincount(torch.tensor([d.token for d in drawn]), minlength=6).tolist()
    assert seen[5] == 0
    chi_square = sum(
        (s - count * p) ** 2 / (count * p) for s, p in zip(seen, expected, strict=True) if p
    )
    assert chi_square < 18.5  # 4 degrees of freedom, 0.1 %
