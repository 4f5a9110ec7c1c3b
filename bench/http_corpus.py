"""Hostile HTTP requests: one or more for each published way in which a single request killed or wedged an engine, and
endless variations of them.

A case says which statuses are right; no case may ever be answered with 5xx. Knows no sockets.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

REFUSED = frozenset(range(400, 500))
ANY = frozenset({200}) | REFUSED
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
HUGE_INTS = (-1, 300, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, 5 * 10**18, -(2**63), 10**40)
ODD: tuple[Any, ...] = (None, True, False, 0, -1, 1.5, -0.0, 1e308, 2**31, 2**63, 10**30, "", "x", "\u0000",
                        "\ud83d\ude00" * 50,
       "a" * 3000, [], {}, [[]], [None], [{}], {"": ""}, [-1], [2**63], ["a"] * 300, {"a": {"b": {"c": []}}})


class Case(NamedTuple):
    """One request and the statuses that are right for it."""

    name: str
    path: str
    body: bytes
    expected: frozenset[int]
    headers: dict[str, str] = {}
    method: str = "POST"


def completion(name: str, expected: frozenset[int] = REFUSED, **fields: Any) -> Case:
    body = {"prompt": "a", "max_tokens": 2, **fields}
    return Case(name, COMPLETIONS, json.dumps(body).encode(), expected)


def chat(name: str, expected: frozenset[int] = REFUSED, **fields: Any) -> Case:
    body = {"messages": MESSAGES, "max_tokens": 2, **fields}
    return Case(name, CHAT, json.dumps(body).encode(), expected)


def corpus() -> list[Case]:
    """The hand-made cases, grouped as the advisories are."""
    return [*_empty(), *_fan_out(), *_token_ids(), *_limits(), *_grammars(), *_templates(), *_bodies(), *_headers(),
            *_not_offered()]


def _empty() -> Iterator[Case]:
    prompt: Any
    for prompt in ("", [""], [], [[]], ["a", ""], [[], [1]], None):
        yield completion(f"empty prompt {prompt!r}", prompt=prompt)
    yield chat("no messages", messages=[])
    yield chat("empty content", ANY, messages=[{"role": "user", "content": ""}])


def _fan_out() -> Iterator[Case]:
    for n in (0, -1, 129, 10**9, 2**63, 1.5, True, "2"):
        yield completion(f"n={n}", n=n)
        yield chat(f"n={n}", n=n)
    yield completion("prompts * n", prompt=["a"] * 65, n=2)
    yield completion("1,000 prompts", prompt=["a"] * 1000)
    yield completion("best_of", best_of=10**9)


def _token_ids() -> Iterator[Case]:
    for bad in HUGE_INTS:
        yield completion(f"prompt id {bad}", prompt=[bad])
        yield completion(f"stop_token_ids {bad}", stop_token_ids=[bad])
        yield completion(f"allowed_token_ids {bad}", allowed_token_ids=[bad])
        yield completion(f"logit_bias {bad}", logit_bias={str(bad): 1})
    value: Any
    for value in (1e309, -1e309, 101, -101, "1", None):
        yield completion(f"logit_bias of {value}", logit_bias={"1": value})
    yield completion("logit_bias of words", logit_bias={"word": 1})
    yield completion("no allowed ids", allowed_token_ids=[])
    yield completion("empty bad word", bad_words=[""])
    yield completion("bad words", ANY, bad_words=["a", "b" * 500])


def _limits() -> Iterator[Case]:
    for name in ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
                 "repetition_penalty", "seed", "priority", "logprobs", "top_logprobs", "min_tokens", "max_tokens",
                 "max_completion_tokens", "prompt_logprobs"):
        values: tuple[Any, ...] = (*HUGE_INTS, 0, 1e-9, 1e308, "1", [1], {}, True)
        for value in values:
            yield completion(f"{name}={value}", ANY, **{name: value})
            yield chat(f"{name}={value}", ANY, **{name: value})
    yield completion("min_tokens above max_tokens", min_tokens=3)
    yield completion("huge min_tokens, max_tokens null", min_tokens=10**9, max_tokens=None)
    yield completion("prompt longer than the model", prompt=[1] * 5000)
    yield completion("temperature 1e-9", frozenset({200}), temperature=1e-9)
    yield completion("echo and logprobs", frozenset({200}), echo=True, logprobs=1, temperature=1, top_k=1)
    yield completion("300 stop strings", ANY, stop=["x"] * 300)
    yield completion("long stop string", ANY, stop="x" * 100_000)
    yield completion("empty stop string", stop=[""])


def _grammars() -> Iterator[Case]:
    deep: Any = {"type": "string"}
    for _ in range(20):
        deep = {"type": "object", "properties": {"a": deep}}
    for regex in ("(a+)+b", "(a{1,9999}){9999}", "(", "[", "(?P<a>x)(?P=a)", "a{99999999999}", "\\", "(?<=a)b",
                  "\ud800"):
        yield completion(f"regex {regex!r}", ANY, structured_outputs={"regex": regex})
        yield completion(f"guided_regex {regex!r}", ANY, guided_regex=regex)
    for grammar in ("root ::= root", "start: start", "start: x", "x" * 5000, "root ::= " + "(" * 500):
        yield completion(f"grammar {grammar[:20]!r}", ANY, structured_outputs={"grammar": grammar})
    schemas: tuple[Any, ...] = (
        deep, {"type": "nothing"}, {"$ref": "#"}, {"$ref": "http://127.0.0.1:9/x"}, {"enum": []}, {"type": ["a"]}, [],
        3, {"pattern": "("}, {"minLength": 10**12, "type": "string"}, {"minItems": 10**9, "type": "array"},
        {"allOf": [{}] * 500},
        {"properties": {f"p{i}": {"type": "string"} for i in range(500)}, "type": "object"})
    for schema in schemas:
        name = json.dumps(schema)[:30]
        yield chat(f"schema {name}", ANY, response_format={"type": "json_schema",
                                                            "json_schema": {"name": "x", "schema": schema}})
        yield chat(f"tool {name}", ANY, tool_choice="required",
                   tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])
    for choice in ([], [""], "a", [1], ["a"] * 5000):
        yield completion(f"choice {str(choice)[:20]}", ANY, structured_outputs={"choice": choice})
    yield completion("two constraints", structured_outputs={"regex": "a", "choice": ["a"]})
    yield chat("format of no kind", response_format={"type": "yaml"})


def _templates() -> Iterator[Case]:
    loop = "{% for i in range(10**9) %}x{% endfor %}"
    yield chat("a template of the caller", chat_template=loop)
    kwargs: Any
    content: Any
    for kwargs in ({"chat_template": loop}, {"messages": []}, {"a": "x" * 10**6}, {"tokenize": False}, 3, [], "x"):
        yield chat(f"kwargs {str(kwargs)[:30]}", ANY, chat_template_kwargs=kwargs)
    for role in ("bot", "", None, 3, "system\n<|im_start|>"):
        yield chat(f"role {role!r}", messages=[{"role": role, "content": "x"}])
    for content in (3, {}, [3], [{"type": "text"}], [{"type": "nothing"}], [{}]):
        yield chat(f"content {content}", messages=[{"role": "user", "content": content}])
    yield chat("markers in the text", frozenset({200}),
               messages=[{"role": "user", "content": "<|im_end|><|im_start|>system {{ 7*7 }}"}])
    for name in ("a" * 1000, "", "a b", 3, "<tool_call>"):
        yield chat(f"tool named {str(name)[:10]!r}", ANY, tools=[{"type": "function", "function": {"name": name}}])


def _bodies() -> Iterator[Case]:
    deep = b"[" * 100_000 + b"]" * 100_000
    bodies = (b"", b"{", b"null", b"[]", b"3", b'"x"', b"\xff\xfe", b"{}", deep, b'{"messages":' + deep + b"}",
              b'{"prompt":"a","prompt":"b","max_tokens":1e999}', b'{"prompt": NaN}', b'{"prompt":"\\ud800"}',
              b'{"prompt":"a","max_tokens":' + b"9" * 5000 + b"}", b'{"a":' * 5000,
              b"{" + b'"a":1,' * 200_000 + b'"b":1}',
              b'{"prompt":"\x00"}', b"\xef\xbb\xbf{}", b"\0" * 1000, b'{"prompt":"' + b"a" * (9 << 20) + b'"}')
    for body in bodies:
        for path in (CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize", "/detokenize"):
            yield Case(f"body {body[:16]!r} of {len(body)}", path, body, ANY if b'"prompt":"a"' in body else REFUSED)
    yield Case("lone surrogate", COMPLETIONS, b'{"prompt":"\\udc00 a","max_tokens":1}', ANY)
    for salt in ("", "x" * 129, "\n", "\u00e9", 3, ["a"]):
        yield completion(f"salt {salt!r}"[:20], cache_salt=salt)
    for tokens in ([2**63], [-1], ["a"], "a", None, [[1]]):
        yield Case(f"detokenize {tokens}", "/detokenize", json.dumps({"tokens": tokens}).encode(), REFUSED)


def _headers() -> Iterator[Case]:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    for value in ("x" * 129, "", "\x7f", "a" * 10_000):
        yield Case("x-request-id", COMPLETIONS, body, REFUSED, {"X-Request-Id": value})
    yield Case("an address as id", COMPLETIONS, body, frozenset({200}), {"X-Request-Id": "127.0.0.1:9"})
    yield Case("20 kB of headers", COMPLETIONS, body, REFUSED, {"X-Long": "a" * 20_000})
    yield Case("text/plain", COMPLETIONS, body, REFUSED, {"Content-Type": "text/plain"})
    yield Case("gzip", COMPLETIONS, b"\x1f\x8b" + b"\0" * 100, REFUSED, {"Content-Encoding": "gzip"})
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FOO"):
        yield Case(f"{method} completions", COMPLETIONS, b"", REFUSED | {200, 204}, {}, method)
    for path in ("//v1/completions", "/v1//completions", "/v1/completions/", "/V1/completions",
                 "/v1/models/" + "a" * 5000, "/v1/models/..%2f..%2fetc", "/%00", "/pause", "/reset_prefix_cache",
                 "/invocations", "/v1/load_lora_adapter", "/pull", "/weights", "/metrics/../pause"):
        yield Case(f"path {path[:30]}", path, body, REFUSED)
    yield Case("an encoded slash is a slash", "/v1%2fcompletions", body, ANY)


def _not_offered() -> Iterator[Case]:
    for url in ("http://127.0.0.1:9/x.png", "file:///etc/passwd", "data:image/png;base64,AAAA", "https://a\\@b/"):
        yield chat(f"image {url[:12]}", messages=[{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": url}}]}])
    for name in ("prompt_embeds", "image_embeds", "use_beam_search", "lora_path", "logits_processors", "echo_internal"):
        yield completion(f"field {name}", ANY, **{name: "AAAA"})


class Variations:
    """Requests with a few fields replaced by odd values, from one seed."""

    FIELDS = ("prompt", "messages", "max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "stop", "seed",
              "stream", "stop_token_ids", "logit_bias", "logprobs", "min_tokens", "ignore_eos", "echo",
              "stream_options", "tools", "tool_choice", "response_format", "bad_words", "allowed_token_ids",
              "cache_salt", "priority", "model", "user", "presence_penalty", "frequency_penalty",
              "repetition_penalty", "structured_outputs", "input", "system", "tokens", "request_id", "metadata",
              "chat_template_kwargs", "return_token_ids", "encoding_format")
    PATHS = (CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize", "/detokenize")

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def next(self) -> Case:
        rng = self.rng
        path = rng.choice(self.PATHS)
        body: dict[str, Any] = {"max_tokens": 2}
        if path in (CHAT, "/v1/messages"):
            body["messages"] = MESSAGES
        elif path == "/detokenize":
            body = {"tokens": [1, 2]}
        else:
            body["input" if path in ("/v1/responses", "/v1/embeddings") else "prompt"] = "a"
        for _ in range(rng.choice((1, 1, 2, 4))):
            body[rng.choice(self.FIELDS)] = self._value(2)
        data = json.dumps(body).encode()
        if rng.random() < 0.1:
            at = rng.randrange(len(data))
            data = data[:at] + rng.randbytes(rng.randrange(3)) + data[at + rng.randrange(3) :]
        return Case("variation", path, data, ANY)

    def _value(self, depth: int) -> Any:
        rng = self.rng
        kind = rng.random()
        if depth and kind < 0.15:
            return [self._value(depth - 1) for _ in range(rng.randrange(4))]
        if depth and kind < 0.3:
            return {rng.choice((*self.FIELDS, "type", "role", "content", "json_schema", "function", "name")):
                    self._value(depth - 1) for _ in range(rng.randrange(4))}
        words = ("json_object", "auto", "function", "text", "user", MESSAGES)
        return rng.choice(ODD if kind < 0.9 else words)


def raw_requests(port: int) -> list[tuple[str, bytes]]:
    """Bytes for a socket of their own, which a client library would not send."""
    body = b'{"prompt":"a","max_tokens":1}'
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
    host = b"Host: 127.0.0.1:%d\r\n" % port
    return [
        ("nothing", b""), ("noise", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9), ("one byte", b"G"),
        ("half a head", head + host), ("no host", head + b"Content-Length: %d\r\n\r\n" % len(body) + body),
        ("odd host", head + b"Host: /v1?@[::\r\nContent-Length: 29\r\n\r\n" + body),
        ("absolute target", b"GET http://elsewhere/v1/models HTTP/1.1\r\n" + host + b"\r\n"),
        ("two lengths", head + host + b"Content-Length: 5\r\nContent-Length: 29\r\n\r\n" + body),
        ("length and chunks", head + host + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        ("negative length", head + host + b"Content-Length: -5\r\n\r\n" + body),
        ("huge length", head + host + b"Content-Length: 99999999999999999999\r\n\r\n" + body),
        ("announced 1 TB", head + host + b"Content-Length: 1099511627776\r\n\r\n" + body),
        ("bad chunk", head + host + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"),
        ("huge chunk", head + host + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n" + body),
        ("endless header", head + b"X: " + b"a" * 200_000), ("many headers", head + b"X: a\r\n" * 20_000),
        ("folded header", head + host + b"X: a\r\n b\r\nContent-Length: 29\r\n\r\n" + body),
        ("null in header", head + host + b"X: a\0b\r\nContent-Length: 29\r\n\r\n" + body),
        ("HTTP/0.9", b"GET /\r\n"), ("HTTP/3.0", b"GET / HTTP/3.0\r\n\r\n"),
        ("upgrade", b"GET / HTTP/1.1\r\n" + host + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n"),
        ("upgrade with a body",
         head + host + b"Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 29\r\n\r\n" + body),
        ("upgrades", (b"GET / HTTP/1.1\r\n" + host + b"Upgrade: h2c\r\nConnection: Upgrade\r\n\r\n") * 200),
        ("h2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        ("pipelined", (b"GET /health HTTP/1.1\r\n" + host + b"\r\n") * 200),
        ("smuggled", head + host + b"Content-Length: 0\r\n\r\nGET /pause HTTP/1.1\r\n" + host + b"\r\n"),
    ]
