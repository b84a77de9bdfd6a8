"""Dialogues of agents with function calls and their actual results, from BFCL's multi-turn problems.

The package has questions, expected calls, and simulators of the functions. Running the calls on the simulators gives
realistic histories. The same package always gives the same traces. Two of its sets are used: `BASE`, and `LONG`, whose
simulators return long lists, files and pages.
"""

from __future__ import annotations

import ast
import copy
import importlib
import json
import sys
import zipfile
from pathlib import Path

BASE, LONG = "multi_turn_base", "multi_turn_long_context"
DATA = "bfcl_eval/data"
SOURCES = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
# Class of functions -> module of its simulator and of its descriptions.
MODULES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
STATELESS = "MathAPI"


def read(wheel: Path, kind: str = BASE) -> dict:
    """`functions`: class -> descriptions. `traces`: dialogues with classes, and turns of (call, result)."""
    with zipfile.ZipFile(wheel) as archive:

        def lines(name: str) -> list[dict]:
            return [json.loads(line) for line in archive.read(f"{DATA}/{name}.json").decode().splitlines() if line]

        functions = {
            name: [_brief(d) for d in lines(f"multi_turn_func_doc/{module}")] for name, module in MODULES.items()
        }
        answers = {a["id"]: a["ground_truth"] for a in lines(f"possible_answer/BFCL_v4_{kind}")}
        problems = lines(f"BFCL_v4_{kind}")
    sys.path.insert(0, str(wheel))
    try:
        simulators = {
            name: getattr(importlib.import_module(f"{SOURCES}.{module}"), name) for name, module in MODULES.items()
        }
        traces = [_trace(problem, answers[problem["id"]], simulators, kind == LONG) for problem in problems]
    finally:
        sys.path.remove(str(wheel))
    return {"functions": functions, "traces": traces}


def _brief(description: dict) -> dict:
    """Name, purpose and parameters of a function, without the text that all functions of a class share."""
    parameters = description["parameters"]
    fields = ("type", "description", "default")
    return {
        "name": description["name"],
        "purpose": " ".join(description["description"].split("Tool description:")[-1].split()),
        "parameters": {
            name: {k: p[k] for k in fields if k in p} for name, p in parameters["properties"].items()
        },
        "required": parameters.get("required", []),
    }


def _trace(problem: dict, answers: list[list[str]], simulators: dict[str, type], long: bool) -> dict:
    classes = sorted(problem["involved_classes"])
    methods: dict = {}
    for name in classes:
        simulator = simulators[name]()
        if name != STATELESS:
            simulator._load_scenario(copy.deepcopy(problem["initial_config"].get(name, {})), long_context=long)
        public = [m for m in dir(simulator) if not m.startswith("_")]
        methods |= {m: getattr(simulator, m) for m in public if callable(getattr(simulator, m))}
    turns = [
        {"user": "\n".join(m["content"] for m in messages), "calls": [[c, _run(c, methods)] for c in calls]}
        for messages, calls in zip(problem["question"], answers)
    ]
    return {"id": problem["id"], "classes": classes, "turns": turns}


def _run(call: str, methods: dict) -> str:
    """Result of a call as an agent sees it."""
    node = ast.parse(call, mode="eval").body
    try:
        positional = [ast.literal_eval(a) for a in node.args]
        result = methods[node.func.id](*positional, **{k.arg: ast.literal_eval(k.value) for k in node.keywords})
    except Exception as e:  # the agent sees exceptions, too
        result = {"error": f"{type(e).__name__}: {e}"}
    return result if isinstance(result, str) else json.dumps(result, default=str)
