from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agentlightning import serving
from agentlightning.config import ServeConfig
from agentlightning.errors import ModelError
from agentlightning.trainer.models import fast_dtype, pick_device, resolve_model
from agentlightning.trainer.serve.server import build_app, eos_ids, load_tokenizer

pytestmark = pytest.mark.slow


def test_a_folder_is_itself(tiny_folder: Path) -> None:
    assert resolve_model(str(tiny_folder)) == tiny_folder.resolve()


def test_a_folder_without_a_model_and_no_folder_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelError, match="there is no folder"):
        resolve_model(str(tmp_path / "absent"))


def test_a_converted_model_is_not_converted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    converted = tmp_path / "agentlightning" / "models" / "smollm2-135m"
    converted.mkdir(parents=True)
    (converted / "config.json").write_text("{}")
    assert resolve_model("smollm2-135m") == converted


def test_a_name_that_cannot_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="neither a folder nor 'smollm2-135m'"):
        resolve_model("nobody/no-such-model")


def test_devices_and_precisions() -> None:
    cpu = torch.device("cpu")
    assert pick_device("cpu") == cpu
    assert fast_dtype("fp32", cpu) == torch.float32
    assert fast_dtype("bf16", cpu) == torch.bfloat16
    with pytest.raises(ModelError, match="'tpus' is not a device"):
        pick_device("tpus")


def test_weights_that_lack_a_tensor_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 tensors, the first is 'model\.norm\.weight'"):
        build_app(ServeConfig(precision="fp32", device="cpu"), folder=tmp_path, name="m")


def test_a_missing_template_is_said_before_anything_listens(tiny_folder: Path) -> None:
    with pytest.raises(ModelError, match="chat template: absent cannot be read"):
        build_app(ServeConfig(), folder=tiny_folder, name="m", chat_template=Path("absent"))


def test_eos_ids_come_from_tokenizer_and_generation_config(
    tiny_folder: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert eos_ids(tmp_path, tokenizer) == {3, 4, tokenizer.eos_token_id}


def test_the_process_says_where_it_listens_and_ends_on_sigterm(tiny_folder: Path) -> None:
    code = (
        "import sys; from agentlightning.config import ServeConfig;"
        "from agentlightning.trainer.serve import run;"
        "run(ServeConfig(cache_tokens=1024), model=sys.argv[1])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tiny_folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    with process, process.stdout:
        line = process.stdout.readline()
        process.terminate()
        assert process.wait(30) == 0
    assert line.startswith("model server listening on http://127.0.0.1:")


def test_a_port_in_use_is_said_at_once(tiny_folder: Path) -> None:
    from agentlightning.errors import ServiceError
    from agentlightning.trainer.serve import run

    sock = serving.listen("127.0.0.1", 0)
    with sock, pytest.raises(ServiceError, match="cannot listen on"):
        run(ServeConfig(), model=str(tiny_folder), port=sock.getsockname()[1])
