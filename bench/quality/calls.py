"""Tool calls: the next function call of an agent, after a dialogue of calls and results.

The context has descriptions of the functions and all messages before the last one, with correct calls. The question is
the last message. Dialogues with the same functions start with the same tokens. An answer is right if it calls the same
function with the same arguments, in any order and with any quotes.
"""

from __future__ import annotations

import ast
import random
from typing import Any

from bench.quality.tasks import Context, Maker, Question

INTRO = (
    "You are an agent. Do what the user asks for with the functions below. Answer with one function call and nothing "
    "else, like name(argument='value'). Its result is sent to you; then make the next call. When nothing is left to "
    "do, say Done."
)
RESULT = "Result: "
Call = tuple[str, dict[str, Any]]


def calls(maker: Maker, data: dict, number: int, tokens: int) -> list[Context]:
    """Up to `number` dialogues of at most `tokens` tokens, each with one question."""
    fitting = [c for trace in data["traces"] if (c := _context(maker, data["functions"], trace, tokens))]
    number = min(number, len(fitting))
    selected = [fitting[i * len(fitting) // number] for i in range(number)]
    return sorted(selected, key=lambda c: c.ids)  # dialogues with the same prefix become neighbors


def _context(maker: Maker, functions: dict, trace: dict, tokens: int) -> Context | None:
    functions_by_name = {f["name"]: f for name in trace["classes"] for f in functions[name]}
    listing = "\n".join(describe(f) for f in functions_by_name.values())
    messages = [{"role": "system", "content": f"{INTRO}\n\n{listing}"}]
    points: list[tuple[int, Call]] = []  # messages before a call, and the call
    for turn in trace["turns"]:
        messages.append({"role": "user", "content": turn["user"]})
        for source, result in turn["calls"]:
            call = parse(source, functions_by_name)
            if call is None:
                return None
            points.append((len(messages), call))
            messages.append({"role": "assistant", "content": format_call(call)})
            messages.append({"role": "user", "content": RESULT + result})
        messages.append({"role": "assistant", "content": "Done."})
    points = points[1:]  # the first call has no example before it
    random.Random(f"calls {trace['id']}").shuffle(points)
    for before, call in points:
        context, ask = _split(maker, messages[:before])
        if len(context) + len(ask) <= tokens:
            answer = {"call": call, "functions": functions_by_name}
            return Context(f"{trace['id']}-{before}", tuple(context), (Question(tuple(ask), answer),))
    return None


def _split(maker: Maker, messages: list[dict]) -> tuple[list[int], list[int]]:
    """Tokens before the last message, and tokens from there to the start of the answer."""
    text = maker.tok.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    head = maker.tok.apply_chat_template(messages[:-1], add_generation_prompt=False, tokenize=False)
    if not text.startswith(head):
        raise ValueError("The chat template changes earlier messages when another one follows.")
    return maker.ids(head), maker.ids(text[len(head) :])


def describe(function: dict) -> str:
    """Description of a function and of its parameters."""
    parameters = function["parameters"]
    lines = [f"{function['name']}({', '.join(parameters)}): {function['purpose']}"]
    for name, p in parameters.items():
        kind = p["type"] if name in function["required"] else f"{p['type']}, optional"
        lines.append(f"  {name} ({kind}): {' '.join(p.get('description', '').split())}")
    return "\n".join(lines)


def parse(source: str, functions: dict[str, dict]) -> Call | None:
    """Name and keyword arguments of a call; None if the text is not a call of one of the functions."""
    try:
        node = ast.parse(source.strip(), mode="eval").body
        if isinstance(node, ast.List | ast.Tuple) and len(node.elts) == 1:
            node = node.elts[0]
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
            return None
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        positional = [ast.literal_eval(a) for a in node.args]
        named = {k.arg: ast.literal_eval(k.value) for k in node.keywords}
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    parameters = functions.get(name, {}).get("parameters")
    if parameters is None or len(positional) > len(parameters):
        return None
    arguments = dict(zip(parameters, positional))
    if set(arguments) & set(named):
        return None
    return name, arguments | named


def complete(call: Call, functions: dict[str, dict]) -> Call:
    """The call with default values for omitted arguments."""
    name, arguments = call
    defaults = {k: p["default"] for k, p in functions[name]["parameters"].items() if "default" in p}
    return name, defaults | arguments


def format_call(call: Call) -> str:
    name, arguments = call
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"


def same_call(answer: dict, text: str) -> bool:
    """Whether the first line of the text is the expected call; `1` and `1.0` are the same argument."""
    lines = [line for line in text.strip().strip("`").splitlines() if line.strip() and line.strip() != "python"]
    functions = answer["functions"]
    call = parse(lines[0].strip().strip("`"), functions) if lines else None
    return call is not None and complete(call, functions) == complete(answer["call"], functions)
