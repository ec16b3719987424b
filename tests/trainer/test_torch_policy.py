"""The PyTorch policy on a tiny random model: gradients, files, refusals."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentlightning.config import LoraConfig, LossConfig, TrainerConfig
from agentlightning.errors import ModelError, TrainerError
from agentlightning.trainer.forward import Sampler, pad_rows, trained_logprobs
from agentlightning.trainer.policy import TrainingRow
from agentlightning.trainer.torch_policy import TorchPolicy
from agentlightning.types import Sample, float_array, mask_array, token_array

pytestmark = [
    pytest.mark.slow,
    # peft 0.21 reads a name that transformers 5.24 renamed
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


def config(**changes) -> TrainerConfig:
    fields = {"precision": "fp32", "device": "cpu", "learning_rate": 1e-2, **changes}
    return TrainerConfig(**fields)


def row(ids, mask, advantage=1.0, weight=0.05, name="r") -> TrainingRow:
    logprobs = float_array([-5.0] * len(ids))
    sample = Sample(
        name, "g", 1.0, token_array(ids), mask_array(mask), logprobs, token_array([0] * len(ids))
    )
    return TrainingRow(sample, advantage, weight)


def rows(count=5, shared=20, seed=0) -> list[TrainingRow]:
    """Rows that begin alike and train two turns each."""
    draw = random.Random(seed)
    beginning = [draw.randrange(256) for _ in range(shared)]
    made = []
    for number in range(count):
        turns = [draw.randrange(2, 9) for _ in range(4)]
        mask = [0] * shared + [
            bit for n, bit in zip(turns, (0, 1, 0, 1), strict=True) for _ in range(n)
        ]
        ids = beginning + [draw.randrange(256) for _ in range(sum(turns))]
        made.append(row(ids, mask, advantage=draw.uniform(-1, 1), name=str(number)))
    return made


def policy(model_dir, **changes) -> TorchPolicy:
    return TorchPolicy(model_dir, config(**changes), seed=0)


def gradient(model_dir, rows, **changes) -> torch.Tensor:
    """The gradient of an update's loss, all weights in one line, before clipping."""
    made = policy(model_dir, gradient_clip=1e9, **changes)
    seen = []
    made._step = lambda: seen.extend(m.grad.flatten().clone() for m in made._masters) or 0.0
    made.update(rows)
    return torch.cat(seen)


def assert_same(first, second):
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


def test_logprobs_and_entropy_are_those_of_the_plain_model(model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    batch = rows()
    ids = [r.sample.token_ids for r in batch]
    trained = [[i for i, m in enumerate(r.sample.loss_mask) if m] for r in batch]
    for share in (True, False):
        padded = pad_rows(ids, trained, share=share)
        assert bool(padded.shared) == share
        logprobs, entropies = trained_logprobs(
            model.base_model, model.lm_head.weight, padded, Sampler(temperature=0.7)
        )
        expected, expected_entropies = [], []
        for each, positions in zip(ids, trained, strict=True):
            table = (model(torch.tensor([list(each)])).logits[0] / 0.7).log_softmax(-1)
            expected += [table[i - 1, each[i]] for i in positions]
            expected_entropies += [-(table[i - 1].exp() * table[i - 1]).sum() for i in positions]
        torch.testing.assert_close(logprobs, torch.stack(expected), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(entropies, torch.stack(expected_entropies), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("sampler", "kept"), [(Sampler(top_k=3), 3), (Sampler(top_p=1e-6), 1), (Sampler(), 260)]
)
def test_what_the_sampler_cuts_off_has_no_probability(model_dir, sampler, kept):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    logits = model(torch.tensor([[1, 2, 3]])).logits[0, -1]
    top = logits.topk(kept)
    for rank in {0, kept - 1}:
        token = int(top.indices[rank])
        padded = pad_rows([token_array([1, 2, 3, token])], [[3]])
        logprob, _ = trained_logprobs(model.base_model, model.lm_head.weight, padded, sampler)
        assert logprob.item() == pytest.approx(top.values.log_softmax(0)[rank].item(), abs=1e-4)


def test_no_cut_order_or_padding_changes_the_gradient(model_dir):
    batch = rows()
    whole = gradient(model_dir, batch, micro_batch_tokens=4096)
    assert_same(gradient(model_dir, batch, micro_batch_tokens=64), whole)
    assert_same(gradient(model_dir, batch[::-1], micro_batch_tokens=90), whole)
    longer = [
        row([*r.sample.token_ids, 9, 9, 9], [*r.sample.loss_mask, 0, 0, 0], r.advantage)
        for r in batch
    ]
    assert_same(gradient(model_dir, longer, micro_batch_tokens=4096), whole)


def test_long_rows_take_the_fused_attention_and_get_the_same_gradient(model_dir, monkeypatch):
    short = gradient(model_dir, rows())
    monkeypatch.setattr("agentlightning.trainer.torch_policy._EAGER_TOKENS", 0)
    assert_same(gradient(model_dir, rows()), short)


def test_splitting_a_rollout_into_more_samples_changes_no_gradient(model_dir):
    batch = rows(3)
    split = []
    for each in batch:
        mask = list(each.sample.loss_mask)
        half = mask.index(0, mask.index(1))
        split.append(row(each.sample.token_ids[:half], mask[:half], each.advantage))
        split.append(row(each.sample.token_ids, [0] * half + mask[half:], each.advantage))
    assert_same(gradient(model_dir, split), gradient(model_dir, batch))


def test_rows_without_advantage_are_not_computed_and_change_nothing(model_dir):
    batch = rows()
    silent = [replace(r, advantage=0.0) for r in rows(3, seed=1)]
    assert_same(gradient(model_dir, batch + silent), gradient(model_dir, batch))
    made = policy(model_dir)
    before = [m.clone() for m in made._masters]
    assert made.update(silent)["tokens_trained"] == 0
    assert all(map(torch.equal, made._masters, before))


def test_an_update_raises_the_probability_of_what_was_rewarded(model_dir):
    made = policy(model_dir)
    good = [row([1, 2, 3, 4, 5], [0, 0, 0, 1, 1], 1.0, 0.5)]
    first = made.update(good)
    for _ in range(5):
        last = made.update(good)
    assert last["kl_rollout_k1"] < first["kl_rollout_k1"]
    assert {"loss", "grad_norm", "entropy", "seconds_gradients", "logprob_difference_max"} <= {
        *last
    }


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_a_reference_holds_the_policy_back(model_dir, lora):
    loss = LossConfig(kl_coefficient=0.5)
    made = policy(model_dir, loss=loss, lora=lora)
    assert made.update(rows())["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert made.update(rows())["kl_reference"] > 0
    silent = [replace(r, advantage=0.0) for r in rows()]
    assert made.update(silent)["grad_norm"] > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_after_load_the_next_update_is_bit_identical(model_dir, tmp_path, precision, lora):
    changes = {"precision": precision, "lora": lora, "warmup_updates": 3}
    steady = policy(model_dir, **changes)
    steady.update(rows(seed=1))
    steady.save(tmp_path)
    expected = steady.update(rows(seed=2))
    resumed = TorchPolicy(model_dir, config(**changes), seed=99)
    resumed.load(tmp_path)
    got = resumed.update(rows(seed=2))
    assert all(map(torch.equal, resumed._masters, steady._masters))
    timeless = [k for k in expected if not k.startswith("seconds")]
    assert [got[k] for k in timeless] == [expected[k] for k in timeless]


def test_small_updates_are_not_lost_in_bf16(model_dir):
    made = policy(model_dir, precision="bf16", learning_rate=1e-6)
    before = [m.clone() for m in made._masters]
    for _ in range(2):
        made.update(rows())
    moved = max(
        float((a - b).detach().abs().max()) for a, b in zip(made._masters, before, strict=True)
    )
    assert moved == pytest.approx(2e-6, rel=0.5)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_an_export_loads_in_transformers_and_answers_like_the_policy(model_dir, tmp_path, lora):
    made = policy(model_dir, lora=lora)
    made.update(rows())
    made.export(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(ids).logits, made._model(input_ids=ids).logits, rtol=0.05, atol=0.2
        )
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (model_dir / name).read_text()


def test_a_gradient_that_is_not_finite_changes_nothing(model_dir):
    made = policy(model_dir)
    before = [m.clone() for m in made._masters]
    with pytest.raises(TrainerError, match="norm is nan"):
        made.update([row([1, 2, 3], [0, 0, 1], advantage=float("nan"))])
    assert all(map(torch.equal, made._masters, before))
    made.update(rows())
    assert all(torch.isfinite(m).all() for m in made._masters)


def test_what_cannot_be_trained_is_refused(model_dir, tmp_path):
    with pytest.raises(ModelError, match="cannot be loaded"):
        TorchPolicy(tmp_path, config(), seed=0)
    with pytest.raises(TrainerError, match="greedy"):
        TorchPolicy(model_dir, config(), seed=0, sampler=Sampler(temperature=0.0))
    with pytest.raises(TrainerError, match=r"no .*policy\.pt"):
        policy(model_dir).load(tmp_path)
    policy(model_dir, lora=LoraConfig(rank=2)).save(tmp_path)
    with pytest.raises(TrainerError, match="other shapes"):
        policy(model_dir).load(tmp_path)
