"""Client of a server's OpenAI-compatible `/v1/completions`, which times streamed answers."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.request import Request, urlopen

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")
TIMEOUT = 1800


@dataclass
class Answer:
    """Seconds from sending to the first and to the last token; token counts as reported by the server, or None."""

    first_token: float
    seconds: float
    tokens: int
    prompt: int | None = None
    cached: int | None = None


class Server(Protocol):
    def complete(self, prompt: list[int], answer: int, hints: dict[str, Any] | None = None) -> Answer: ...


@dataclass
class Completions:
    """Client of a server's `/v1/completions`, with streaming."""

    url: str
    model: str = "default"
    text: bool = False

    def complete(self, prompt: list[int], answer: int, hints: dict[str, Any] | None = None) -> Answer:
        """Send `hints` as `custom_params`."""
        content: Any = " ".join(WORDS[i % len(WORDS)] for i in prompt) if self.text else prompt
        body = {"model": self.model, "prompt": content, "max_tokens": answer, "temperature": 0, "ignore_eos": True}
        body |= {"custom_params": hints} if hints else {}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        began, first, usage, chunks = time.monotonic(), None, {}, 0
        headers = {"Content-Type": "application/json"}
        request = Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with urlopen(request, timeout=TIMEOUT) as response:  # `requests` delays the lines of a stream
            for line in response:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                usage = event.get("usage") or usage
                if event.get("choices"):
                    chunks += 1
                    first = first or time.monotonic()
        ended = time.monotonic()
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            (first or ended) - began, ended - began, usage.get("completion_tokens", chunks),
            usage.get("prompt_tokens"), details.get("cached_tokens"),
        )  # fmt: skip
