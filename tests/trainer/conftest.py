from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 260


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    """A random Llama over bytes and four special tokens, as a transformers folder."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    directory = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (directory / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 256}))
    return directory
