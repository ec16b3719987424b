"""An agent with a calculator. It knows an OpenAI endpoint and nothing else.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… MODEL=… python agent.py "Take 12, multiply by 7, add 5."

The model asks for the tool with a line ``CALL calc(12 * 7 + 5)``, gets ``RESULT 89`` and ends
with ``ANSWER 89``. The answer is printed; ``answer.json`` holds what was said.
"""

from __future__ import annotations

import ast
import json
import operator
import os
import re
import sys

from openai import OpenAI

SYSTEM = "You have a tool: CALL calc(expression). Give the result as ANSWER number."
EXAMPLE = (
    ("user", "Take 12, add 7."),
    ("assistant", "CALL calc(12 + 7)"),
    ("user", "RESULT 19"),
    ("assistant", "ANSWER 19"),
)
MAX_TURNS = 3
MAX_TOKENS = 24
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calc(expression: str) -> int:
    """The value of an expression of whole numbers with + - *; ValueError for anything else."""
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"cannot compute {expression!r}") from error


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError(f"not arithmetic: {ast.unparse(node)}")


def tool_result(text: str) -> str | None:
    """What the tool answers to a model's message; None where the message calls no tool."""
    call = re.search(r"CALL calc\((.*)\)", text)
    if call is None:
        return None
    try:
        return f"RESULT {calc(call[1])}"
    except ValueError as error:
        return f"ERROR {error}"


def solve(client: OpenAI, model: str, question: str, *, example: bool = True) -> list[dict]:
    """Talks to the model until it calls no tool; returns all messages."""
    said = (("system", SYSTEM), *(EXAMPLE if example else ()), ("user", question))
    messages = [{"role": role, "content": content} for role, content in said]
    for _ in range(MAX_TURNS):
        answer = client.chat.completions.create(
            model=model, messages=messages, max_tokens=MAX_TOKENS
        )
        text = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        result = tool_result(text)
        if result is None:
            break
        messages.append({"role": "user", "content": result})
    return messages


def final_answer(messages: list[dict]) -> str | None:
    """The number after ANSWER in the last message, or None."""
    found = re.search(r"ANSWER (-?\d+)", messages[-1]["content"])
    return found[1] if found else None


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if argument != "--no-example"]
    question = arguments[0] if arguments else os.environ["TASK_QUESTION"]
    model = os.environ.get("MODEL", "smollm2-135m")
    messages = solve(OpenAI(), model, question, example="--no-example" not in sys.argv)
    answer = final_answer(messages)
    with open("answer.json", "w", encoding="utf-8") as file:
        json.dump({"question": question, "answer": answer, "messages": messages}, file, indent=1)
    print(answer if answer is not None else "no answer")


if __name__ == "__main__":
    main()
