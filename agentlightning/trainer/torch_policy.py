"""The policy in PyTorch: a transformers model, AdamW on fp32 master weights, CPU or one GPU."""

from __future__ import annotations

import copy
import ctypes
import json
import shutil
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from agentlightning.config import LoraConfig, TrainerConfig
from agentlightning.errors import ModelError, TrainerError
from agentlightning.losses import TokenBatch, combine, policy_loss
from agentlightning.trainer.batch import micro_batches
from agentlightning.trainer.forward import (
    PaddedRows,
    Sampler,
    can_share,
    pad_rows,
    trained_logprobs,
)
from agentlightning.trainer.models import fast_dtype, pick_device
from agentlightning.trainer.policy import TrainingRow

_STATE_FILE = "policy.pt"
_EAGER_TOKENS = 1024
"""On a CPU the fused attention kernel's backward pass is slower than plain matrix products, which
however keep a [T × T] matrix a head and layer: used up to this many tokens a row."""
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".gguf"}


class TorchPolicy:
    """Implements :class:`agentlightning.trainer.policy.Policy`.

    ``sampler`` is how train mode samples. One update is one pass over its rows, so the policy
    before the update is the policy that computes the logprobs: the surrogate's ratio is 1 and
    its clips are idle; what corrects for stale tokens is the importance ratio of the recorded
    logprobs. Raises ModelError for a folder that cannot be loaded or trained.
    """

    def __init__(
        self, model_dir: Path, config: TrainerConfig, *, seed: int, sampler: Sampler | None = None
    ) -> None:
        torch.manual_seed(seed)
        self._config = config
        self._sampler = sampler or Sampler()
        if self._sampler.temperature <= 0:
            raise TrainerError(
                f"sampling.temperature is {self._sampler.temperature}: greedy answers of one task "
                "are all alike and teach nothing. Set it above 0."
            )
        self._model_dir = model_dir
        self._device = pick_device(config.device)
        self._dtype = fast_dtype(config.precision, self._device)
        self._model = _load(model_dir, self._dtype).to(self._device)
        self._share = can_share(self._model.config)
        keeps_reference = config.loss.kl_coefficient > 0 and config.lora is None
        self._reference = (
            copy.deepcopy(self._model).requires_grad_(False) if keeps_reference else None
        )
        if config.lora is not None:
            self._model = _with_lora(self._model, config.lora)
        self._model.train()
        self._trained = [p for p in self._model.parameters() if p.requires_grad]
        self._masters = [_master(p) for p in self._trained]
        self._optimizer = torch.optim.AdamW(
            self._masters,
            lr=config.learning_rate,
            betas=config.adam_betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._updates = 0

    @property
    def description(self) -> str:
        trained = sum(p.numel() for p in self._trained)
        kind = str(self._dtype).removeprefix("torch.")
        adapters = " in adapters" if self._config.lora else ""
        return (
            f"{self._model_dir.name}, {trained / 1e6:.1f} M trained parameters{adapters}, "
            f"{kind} on {self._device}"
        )

    # --- the update

    def update(self, rows: Sequence[TrainingRow]) -> Mapping[str, float]:
        """One optimizer step. Without a row that has a gradient there is none: nothing changes,
        and ``tokens_trained`` is 0.

        Metrics: ``loss``, ``grad_norm`` (before clipping), ``entropy`` (nats), ``learning_rate``,
        what :func:`agentlightning.losses.combine` gives, ``tokens_trained`` and
        ``tokens_computed`` (tokens through the model, padding among them), and seconds:
        ``seconds_gradients``, ``seconds_optimizer``.
        """
        started = time.perf_counter()
        active = [row for row in rows if self._has_gradient(row)]
        if not active:
            return {"tokens_trained": 0.0, "tokens_computed": 0.0}
        parts = []
        for batch in micro_batches(active, max_tokens=self._config.micro_batch_tokens):
            parts.append(self._accumulate(batch))
        between = time.perf_counter()
        norm = self._step()
        self._give_memory_back()
        return {
            **_totals(parts),
            "grad_norm": norm,
            "learning_rate": self._optimizer.param_groups[0]["lr"],
            "seconds_gradients": between - started,
            "seconds_optimizer": time.perf_counter() - between,
        }

    def _has_gradient(self, row: TrainingRow) -> bool:
        wanted = row.advantage != 0 or self._config.loss.kl_coefficient > 0
        return wanted and row.sample.trained_tokens > 0

    def _accumulate(self, batch: Sequence[TrainingRow]) -> dict[str, Tensor]:
        """Adds the gradient of a micro-batch to the masters'; returns its statistics."""
        trained = [_trained_positions(row) for row in batch]
        rows = pad_rows([row.sample.token_ids for row in batch], trained, share=self._share)
        rows = _to(rows, self._device)
        self._choose_attention(rows.ids_BT.shape[1])
        logprobs_N, entropy_N = trained_logprobs(*self._parts(), rows, self._sampler)
        tokens = TokenBatch(
            logprobs_N,
            logprobs_N.detach(),
            self._per_token(
                [
                    row.sample.rollout_logprobs[i]
                    for row, at in zip(batch, trained, strict=True)
                    for i in at
                ]
            ),
            self._repeated([row.advantage for row in batch], trained),
            self._repeated([row.token_weight for row in batch], trained),
            torch.ones_like(logprobs_N, dtype=torch.bool),
            self._reference_logprobs(rows),
        )
        loss, statistics = policy_loss(tokens, self._config.loss)
        loss.backward()  # type: ignore[no-untyped-call]
        self._collect_gradients()
        statistics["sum/loss"] = loss.detach()
        statistics["mean/entropy"] = entropy_N.sum()
        computed = rows.ids_BT.numel() - rows.shared * (len(rows.ids_BT) - 1)
        statistics["sum/tokens_computed"] = torch.tensor(float(computed))
        return statistics

    def _choose_attention(self, tokens: int) -> None:
        plain = self._device.type == "cpu" and tokens <= _EAGER_TOKENS
        kind = "eager" if plain else "sdpa"
        model = _unwrapped(self._model)
        if model.config._attn_implementation != kind:
            model.set_attn_implementation(kind)

    def _per_token(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def _repeated(self, values: Sequence[float], trained: Sequence[Sequence[int]]) -> Tensor:
        pairs = zip(values, trained, strict=True)
        return self._per_token([value for value, at in pairs for _ in at])

    def _parts(self, model: Any = None) -> tuple[Any, Tensor]:
        """The backbone and the head's weight [V, H]."""
        causal = _unwrapped(model or self._model)
        return causal.base_model, causal.get_output_embeddings().weight

    @torch.no_grad()
    def _reference_logprobs(self, rows: PaddedRows) -> Tensor | None:
        if self._config.loss.kl_coefficient == 0:
            return None
        if self._reference is not None:
            return trained_logprobs(*self._parts(self._reference), rows, self._sampler)[0]
        with self._model.disable_adapter():
            return trained_logprobs(*self._parts(), rows, self._sampler)[0]

    def _collect_gradients(self) -> None:
        """Sums gradients in fp32: bf16 would lose the small ones of later micro-batches."""
        for parameter, master in zip(self._trained, self._masters, strict=True):
            if master is parameter or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.to(master.dtype)
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    def _step(self) -> float:
        gradients = [master.grad for master in self._masters if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):
            self._optimizer.zero_grad()
            raise TrainerError(
                f"the gradient's norm is {norm.item()}: this update is left out and the weights "
                "are unchanged. Lower trainer.learning_rate or set trainer.precision=fp32."
            )
        torch.nn.utils.clip_grads_with_norm_(self._masters, self._config.gradient_clip, norm)
        warm = min(1.0, (self._updates + 1) / (self._config.warmup_updates + 1))
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * warm
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._updates += 1
        self._publish_masters()
        return norm.item()

    def _give_memory_back(self) -> None:
        """glibc keeps what an update freed, several GB, which the model server may need."""
        if self._device.type == "cpu" and sys.platform == "linux":
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
            if trim is not None:
                trim(0)

    @torch.no_grad()
    def _publish_masters(self) -> None:
        for parameter, master in zip(self._trained, self._masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)

    # --- files

    def export(self, directory: Path) -> None:
        """A transformers folder: bf16 safetensors, and all else that the model came with."""
        directory.mkdir(parents=True, exist_ok=True)
        _unwrapped(self._model).save_pretrained(directory, state_dict=self._bf16_state())
        # save_pretrained writes the type that the model computes in, not that of the weights
        settings = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(
            json.dumps({**settings, "dtype": "bfloat16"}, indent=2)
        )
        for path in sorted(self._model_dir.iterdir()):
            known = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
            if path.is_file() and not known and not (directory / path.name).exists():
                shutil.copyfile(path, directory / path.name)

    @torch.no_grad()
    def _bf16_state(self) -> dict[str, Tensor]:
        """Weights by the plain model's names; adapters are added in."""
        state = {}
        for name, weight in _unwrapped(self._model).state_dict().items():
            if "lora_" not in name:
                state[name.replace(".base_layer", "")] = weight.to(torch.bfloat16)
        for name, module in _unwrapped(self._model).named_modules():
            if hasattr(module, "get_delta_weight") and f"{name}.weight" in state:
                full = module.base_layer.weight.float() + module.get_delta_weight("default").float()
                state[f"{name}.weight"] = full.to(torch.bfloat16)
        return state

    def save(self, directory: Path) -> None:
        """Masters, optimizer, number of updates and random state, in one file."""
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "masters": [master.detach() for master in self._masters],
                "optimizer": self._optimizer.state_dict(),
                "updates": self._updates,
                "random": torch.get_rng_state(),
                "random_cuda": torch.cuda.get_rng_state_all(),
            },
            directory / _STATE_FILE,
        )

    def load(self, directory: Path) -> None:
        """Raises TrainerError where the file is missing or belongs to another model."""
        path = directory / _STATE_FILE
        if not path.is_file():
            raise TrainerError(f"there is no {path}. Give a folder that TorchPolicy.save wrote.")
        state = torch.load(path, map_location="cpu", weights_only=True)
        shapes = [master.shape for master in state["masters"]]
        if shapes != [master.shape for master in self._masters]:
            raise TrainerError(
                f"{path} holds weights of other shapes than {self.description}. "
                "Resume with the model and LoRA settings that the run began with."
            )
        with torch.no_grad():
            for master, saved in zip(self._masters, state["masters"], strict=True):
                master.copy_(saved)
        self._publish_masters()
        self._optimizer.load_state_dict(state["optimizer"])
        self._updates = state["updates"]
        torch.set_rng_state(state["random"])
        if state["random_cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["random_cuda"])


def _trained_positions(row: TrainingRow) -> list[int]:
    return [i for i, trained in enumerate(row.sample.loss_mask) if trained]


def _to(rows: PaddedRows, device: torch.device) -> PaddedRows:
    return PaddedRows(
        rows.ids_BT.to(device),
        rows.positions_N.to(device),
        rows.targets_N.to(device),
        rows.shared,
    )


def _totals(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    totals = combine(parts)
    for name in ("loss", "tokens_computed"):
        totals[name] = sum(float(part[f"sum/{name}"]) for part in parts)
    return totals


def _unwrapped(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _master(parameter: Tensor) -> Tensor:
    """fp32 weights for the optimizer: the parameter itself where it is fp32 already."""
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().float().clone().requires_grad_()


def _load(model_dir: Path, dtype: torch.dtype) -> Any:
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model {model_dir} cannot be loaded: {error}. Give a folder with a transformers model."
        ) from error
    _check_head(model, model_dir)
    return model


@torch.no_grad()
def _check_head(model: Any, model_dir: Path) -> None:
    """The forward pass takes the head for one matrix; some models do more after it."""
    model.eval()
    ids = torch.tensor([[1, 2, 3]])
    head = model.get_output_embeddings()
    ours = model.base_model(input_ids=ids, use_cache=False).last_hidden_state @ head.weight.T
    theirs = model(input_ids=ids, use_cache=False).logits
    if not torch.allclose(ours.float(), theirs.float(), rtol=0.05, atol=0.05):
        raise ModelError(
            f"model {model_dir} ({type(model).__name__}) changes its logits after the head (a "
            "bias, a scale or a cap), which this trainer does not do. Choose another model."
        )


def _with_lora(model: Any, lora: LoraConfig) -> Any:
    import peft  # optional at run time and slow to import

    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.targets,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks for names that were changed
        return peft.get_peft_model(model, settings)
