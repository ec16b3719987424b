"""A tiny random Llama with a real byte-level tokenizer, saved as transformers saves models."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS, PAD = "<|end|>", "<|pad|>"

CHAT_TEMPLATE = (
    "{% if tools %}tools:{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}"
    "{% for call in m.get('tool_calls', []) %}<tool_call>{{ call['function'] | tojson }}"
    "</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def save_tiny_model(folder: Path, *, seed: int = 0, hidden: int = 32, context: int = 256) -> Path:
    """Two layers, 4 heads over 2 key-value heads, one token a byte and two special ones.

    Weights are drawn with ``seed``, wide enough that the distribution is far from uniform.
    """
    tokenizer = tiny_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=hidden,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=context,
                initializer_range=0.3,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                tie_word_embeddings=True,
            )
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Token id of a byte is its place in the byte-level alphabet; nothing is merged."""
    alphabet = sorted(ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(EOS, special=True), AddedToken(PAD, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
