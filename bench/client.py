"""A small client of SGLang's native HTTP API: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import requests

TIMEOUT = 1200


class RequestRefused(RuntimeError):
    """The server answered with an error; `.status` is the HTTP status."""

    def __init__(self, status: int, text: str):
        super().__init__(f"HTTP {status}: {text[:500]}")
        self.status = status


@dataclass
class Answer:
    """One finished request."""

    text: str
    ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    finish: dict[str, Any]
    logprobs: list[float] = field(default_factory=list)  # of the generated tokens
    top: list[dict[int, float]] = field(default_factory=list)  # per generated token: best candidates -> logprob
    input_logprobs: list[float] = field(default_factory=list)  # of prompt tokens, from logprob_start_len
    input_top: list[dict[int, float]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    first_token_s: float | None = None  # from sending to the first token; only for streamed answers

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Answer:
        meta = body["meta_info"]

        def values(key: str) -> list[float]:
            return [entry[0] for entry in meta.get(key) or [] if entry[0] is not None]

        def tops(key: str) -> list[dict[int, float]]:
            return [{t: lp for lp, t, *_ in entry} for entry in meta.get(key) or [] if entry]

        return cls(
            text=body.get("text", ""),
            ids=body.get("output_ids", []),
            prompt_tokens=meta.get("prompt_tokens", 0),  # a request aborted early has none
            cached_tokens=meta.get("cached_tokens", 0),
            finish=meta["finish_reason"] or {},
            logprobs=values("output_token_logprobs"),
            top=tops("output_top_logprobs"),
            input_logprobs=values("input_token_logprobs"),
            input_top=tops("input_top_logprobs"),
            meta=meta,
        )


@dataclass
class Client:
    """Client of one server. By default, answers are greedy and have a fixed length (`ignore_eos`)."""

    url: str

    def payload(
        self,
        prompt: Sequence[int] | str,
        max_new_tokens: int = 32,
        *,
        ignore_eos: bool = True,
        temperature: float = 0.0,
        logprobs: bool = False,
        top: int = 0,
        input_from: int | None = None,
        sampling: dict[str, Any] | None = None,
        **extra: Any,
    ) -> dict[str, Any]:
        """Body of a request. `input_from`: also return log-probabilities of prompt tokens from this position.

        The server recomputes these tokens, even if they are cached, so the prefix hit is shorter.
        """
        body: dict[str, Any] = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        body["sampling_params"] = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "ignore_eos": ignore_eos,
            **(sampling or {}),
        }
        if logprobs or top or input_from is not None:
            body["return_logprob"] = True
            body["top_logprobs_num"] = top
            if input_from is not None:
                body["logprob_start_len"] = input_from
        return {**body, **extra}

    def generate(self, prompt: Sequence[int] | str, max_new_tokens: int = 32, **options: Any) -> Answer:
        return self.post_generate(self.payload(prompt, max_new_tokens, **options))

    def post_generate(self, payload: dict[str, Any]) -> Answer:
        response = requests.post(self.url + "/generate", json=payload, timeout=TIMEOUT)
        if response.status_code != 200:
            raise RequestRefused(response.status_code, response.text)
        return Answer.parse(response.json())

    def generate_streamed(self, prompt: Sequence[int] | str, max_new_tokens: int = 32, **options: Any) -> Answer:
        """The answer of `generate`, with `first_token_s`. The server must run without `--incremental-streaming-output`,
        because the last event must contain the complete answer."""
        body = json.dumps(self.payload(prompt, max_new_tokens, stream=True, **options)).encode()
        request = Request(self.url + "/generate", body, {"Content-Type": "application/json"})
        began, first, event = time.monotonic(), None, {}
        try:
            with urlopen(request, timeout=TIMEOUT) as response:  # `requests` delays the lines of a stream
                for line in response:
                    if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                        first = first or time.monotonic()
                        event = json.loads(line[len(b"data: ") :])
        except HTTPError as e:
            raise RequestRefused(e.code, e.read().decode(errors="replace")) from e
        if first is None or "error" in event:
            error = event.get("error", {"message": "the stream has no event"})
            raise RequestRefused(error.get("code", 500), str(error["message"]))
        answer = Answer.parse(event)
        answer.first_token_s = first - began
        return answer

    def generate_many(
        self,
        prompts: Sequence[Sequence[int] | str],
        max_new_tokens: int = 32,
        parallel: int = 8,
        **options: Any,
    ) -> list[Answer]:
        """Answers to all prompts, in order, with up to `parallel` concurrent requests."""
        with ThreadPoolExecutor(parallel) as pool:
            return list(pool.map(lambda p: self.generate(p, max_new_tokens, **options), prompts))

    def generate_each(
        self,
        prompts: Sequence,
        lengths: Sequence[int],
        parallel: int = 8,
        may_fail: bool = False,
        **options: Any,
    ) -> list[Answer | None]:
        """Like `generate_many`, with another number of new tokens for each prompt. With `may_fail`, a refused request
        gives None."""

        def generate(prompt, n: int) -> Answer | None:
            try:
                return self.generate(prompt, n, **options)
            except RequestRefused:
                if may_fail:
                    return None
                raise

        with ThreadPoolExecutor(parallel) as pool:
            return list(pool.map(generate, prompts, lengths))

    def chat(self, messages: list[dict[str, str]], max_tokens: int = 32, **options: Any) -> dict[str, Any]:
        """JSON of one OpenAI chat completion."""
        body = {
            "model": "default",
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            **options,
        }
        response = requests.post(self.url + "/v1/chat/completions", json=body, timeout=TIMEOUT)
        if response.status_code != 200:
            raise RequestRefused(response.status_code, response.text)
        return response.json()

    def post(self, path: str, body: dict[str, Any] | None = None) -> requests.Response:
        return requests.post(self.url + path, json=body or {}, timeout=TIMEOUT)

    def flush(self, wait: float = 60) -> None:
        """Empty the cache once no request runs; fail after `wait` seconds."""
        response = requests.post(self.url + "/flush_cache", params={"timeout": wait}, timeout=wait + 30)
        if response.status_code != 200:
            raise RequestRefused(response.status_code, response.text)

    def server_info(self) -> dict[str, Any]:
        response = requests.get(self.url + "/server_info", timeout=TIMEOUT)
        response.raise_for_status()
        return response.json()

    def stats(self) -> dict[str, Any]:
        """Statistics of the cache (`KvcStats`); empty on a stock server."""
        return self.kvc_info().get("stats") or {}

    def kvc_info(self) -> dict[str, Any]:
        """`kvc` state of the server: configuration, statistics, head map."""
        states = self.server_info().get("internal_states") or [{}]
        return states[0].get("kvc") or {}

    def when_idle(self, seconds: float = 30) -> dict[str, Any]:
        """Statistics of the cache once two consecutive readings agree, because blocks are still packed after the last
        answer."""
        last, until = None, time.monotonic() + seconds
        while time.monotonic() < until:
            now = self.stats()
            if now == last:
                return now
            last = now
            time.sleep(0.5)
        return last or {}
