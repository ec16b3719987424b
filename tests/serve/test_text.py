from __future__ import annotations

import pytest

from agentlightning.trainer.serve.text import TextStream
from agentlightning.trainer.serve.tools import ToolCall, ToolCallParser, parse_call
from tests.fakes.tiny_model import tiny_tokenizer

pytestmark = pytest.mark.slow

TOKENIZER = tiny_tokenizer()


def pieces(text: str, stops: list[str]) -> tuple[list[str], bool]:
    stream = TextStream(TOKENIZER, stops)
    out = [stream.push(token) for token in TOKENIZER.encode(text)]
    return [*out, stream.finish()], stream.stopped


def test_no_piece_holds_half_a_character() -> None:
    out, _ = pieces("naïve 日本 🙂", [])
    assert "".join(out) == "naïve 日本 🙂"
    assert not any("�" in piece for piece in out)


def test_an_incomplete_character_at_the_end_is_shown_as_such() -> None:
    stream = TextStream(TOKENIZER)
    tokens = TOKENIZER.encode("a🙂")[:-1]
    assert [stream.push(t) for t in tokens] == ["a", "", "", ""]
    assert stream.finish().startswith("�")


def test_text_ends_before_a_stop_string_that_came_in_pieces() -> None:
    out, stopped = pieces("one STOP two", ["STOP", "other"])
    assert ("".join(out), stopped) == ("one ", True)


def test_what_only_looked_like_a_stop_string_comes_later() -> None:
    out, stopped = pieces("a STO", ["STOP"])
    assert ("".join(out[:-1]), out[-1], stopped) == ("a ", "STO", False)


def test_special_tokens_are_no_text() -> None:
    stream = TextStream(TOKENIZER)
    assert stream.push(TOKENIZER.eos_token_id) + stream.finish() == ""


def parsed(text: str) -> tuple[str, list[ToolCall]]:
    parser = ToolCallParser()
    pieces = [parser.push(char) for char in text] + [parser.push("", last=True)]
    return "".join(text for text, _ in pieces), [call for _, calls in pieces for call in calls]


def test_calls_and_text_are_told_apart() -> None:
    content, calls = parsed(
        'Let me see.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>{"name": "now"}</tool_call>'
    )
    assert content == "Let me see."
    assert [(c.index, c.name, c.arguments) for c in calls] == [
        (0, "add", '{"a": 1}'),
        (1, "now", "{}"),
    ]
    assert all(c.id.startswith("call_") for c in calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{broken</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>[1]</tool_call> and on",
        "a < b <tool",
        "<tool_call>never ended",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert parsed(text) == (text, [])


def test_a_last_call_may_lack_its_closing_tag() -> None:
    assert parsed('<tool_call>{"name": "f", "arguments": {}}')[1][0].name == "f"


def test_arguments_must_be_an_object() -> None:
    assert parse_call('{"name": "f", "arguments": [1]}') is None
    assert parse_call('{"name": "f", "arguments": null}') == ("f", "{}")
