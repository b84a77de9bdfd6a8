"""An agent's next function call: descriptions of functions and a dialogue of calls and results before it.

The context is everything before the last message, with every earlier call right; the question is that message.
Dialogues with the same functions begin with the same tokens. An answer is right if it calls the same function with the
same arguments, in any order and with any quotes.
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
    """Up to `number` dialogues, each with one call that is asked for, of at most `tokens` tokens."""
    fitting = [c for trace in data["traces"] if (c := _context(maker, data["functions"], trace, tokens))]
    number = min(number, len(fitting))
    chosen = [fitting[i * len(fitting) // number] for i in range(number)]
    return sorted(chosen, key=lambda c: c.ids)  # dialogues with the same beginning follow each other


def _context(maker: Maker, functions: dict, trace: dict, tokens: int) -> Context | None:
    known = {f["name"]: f for name in trace["classes"] for f in functions[name]}
    listing = "\n".join(describe(f) for f in known.values())
    messages = [{"role": "system", "content": f"{INTRO}\n\n{listing}"}]
    points: list[tuple[int, Call]] = []  # messages before a call, and the call
    for turn in trace["turns"]:
        messages.append({"role": "user", "content": turn["user"]})
        for source, result in turn["calls"]:
            call = parse(source, known)
            if call is None:
                return None
            points.append((len(messages), call))
            messages.append({"role": "assistant", "content": written(call)})
            messages.append({"role": "user", "content": RESULT + result})
        messages.append({"role": "assistant", "content": "Done."})
    points = points[1:]  # the very first call has no example of a call before it
    random.Random(f"calls {trace['id']}").shuffle(points)
    for before, call in points:
        context, ask = _split(maker, messages[:before])
        if len(context) + len(ask) <= tokens:
            answer = {"call": call, "functions": known}
            return Context(f"{trace['id']}-{before}", tuple(context), (Question(tuple(ask), answer),))
    return None


def _split(maker: Maker, messages: list[dict]) -> tuple[list[int], list[int]]:
    """Tokens before the last message, and tokens from it up to the beginning of the answer."""
    whole = maker.tok.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    head = maker.tok.apply_chat_template(messages[:-1], add_generation_prompt=False, tokenize=False)
    if not whole.startswith(head):
        raise ValueError("The chat template writes earlier messages anew when another one follows.")
    return maker.ids(head), maker.ids(whole[len(head) :])


def describe(function: dict) -> str:
    """Description of a function and of its parameters."""
    parameters = function["parameters"]
    lines = [f"{function['name']}({', '.join(parameters)}): {function['purpose']}"]
    for name, p in parameters.items():
        kind = p["type"] if name in function["required"] else f"{p['type']}, optional"
        lines.append(f"  {name} ({kind}): {' '.join(p.get('description', '').split())}")
    return "\n".join(lines)


def parse(source: str, functions: dict[str, dict]) -> Call | None:
    """Name and arguments by name; None if the text is not a call of one of the functions."""
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
    given = dict(zip(parameters, positional))
    if set(given) & set(named):
        return None
    return name, given | named


def complete(call: Call, functions: dict[str, dict]) -> Call:
    """The call with default values for omitted arguments."""
    name, arguments = call
    defaults = {k: p["default"] for k, p in functions[name]["parameters"].items() if "default" in p}
    return name, defaults | arguments


def written(call: Call) -> str:
    name, arguments = call
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"


def same_call(answer: dict, text: str) -> bool:
    """Whether the first line of the text is the call; `1` and `1.0` are the same argument."""
    lines = [line for line in text.strip().strip("`").splitlines() if line.strip() and line.strip() != "python"]
    functions = answer["functions"]
    found = parse(lines[0].strip().strip("`"), functions) if lines else None
    return found is not None and complete(found, functions) == complete(answer["call"], functions)
