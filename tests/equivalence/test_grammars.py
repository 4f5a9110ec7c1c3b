"""Grammars in every mode of the engine: sync and async, recompute and swap, in a pool that forces preemption, beside
rows without one. Each request gets what it gets alone, and the core ends it where its grammar ends."""
from __future__ import annotations

import functools
import itertools
import json
import re
from typing import Any

import pytest

from ipc.errors import INVALID
from ipc.messages import FINISH_ERROR, FINISH_STOP
from ipc.structured_outputs import StructuredOutputs
from tests.equivalence.test_sampling_matrix import ExtrasEngine
from worker.sampling.grammar import Grammars
from worker.sampling.grammar_vocabulary import from_table

TOKENS = [char.encode() for char in 'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.'] + [b"true", b"12", b'{"', b'":',
                                                                                     b"null", b"ab"]
LIST = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 3, "maxItems": 6}
PAIR = {"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer"}}, "required": ["ok", "n"],
        "additionalProperties": False}
PREFIX = [3, 1, 4, 1, 5, 9, 2, 6]
FORMS: dict[str, dict[str, Any]] = {
    "list": dict(json=json.dumps(LIST)), "pair": dict(json=json.dumps(PAIR)), "regex": dict(regex="(ab|c[0-9]){8}"),
    "choice": dict(choice=["abracadabra", "abrac", "table"]), "open": dict(regex="[a-f]{2,40}"),
    "bad": dict(regex="["), "free": dict()}


def requests() -> dict[int, tuple[list[int], dict[str, Any]]]:
    found = {}
    for number, form in enumerate(list(FORMS.values()) * 2, 1):
        spec = StructuredOutputs(**form) if form else None
        found[number] = [*PREFIX, number], dict(max_tokens=24, temperature=1.0, seed=number, structured_outputs=spec,
                                                logprobs=2 if number % 2 else None)
    return found


def engine_of(**options: Any) -> ExtrasEngine:
    engine = ExtrasEngine(**options)
    engine.worker.grammars = Grammars(lambda: from_table(TOKENS, [], []))
    return engine


def outcome(engine: ExtrasEngine, request_id: int) -> tuple[Any, ...]:
    end = engine.ends[request_id]
    return engine.tokens[request_id], dict(engine.extras[request_id]), end.reason, end.error_code


@functools.cache
def alone() -> dict[int, tuple[Any, ...]]:
    found = {}
    for request_id, (prompt, params) in requests().items():
        engine = engine_of(num_blocks=64, caching=False)
        engine.add(request_id, prompt, **params)
        engine.run()
        found[request_id] = outcome(engine, request_id)
    return found


def text_of(request_id: int) -> str:
    return b"".join(TOKENS[token] for token in alone()[request_id][0]).decode()


def test_alone_each_output_has_its_form():
    ended = {request_id for request_id, found in alone().items() if found[2] == FINISH_STOP}
    assert len(ended) >= 5
    for request_id, name in enumerate(list(FORMS) * 2, 1):
        if name == "bad":
            assert alone()[request_id][2:] == (FINISH_ERROR, INVALID)
        elif request_id in ended:
            text = text_of(request_id)
            if name == "list":
                assert 3 <= len(json.loads(text)) <= 6
            elif name == "pair":
                assert set(json.loads(text)) == {"ok", "n"}
            elif name == "regex":
                assert re.fullmatch("(ab|c[0-9]){8}", text)
            elif name == "choice":
                assert text in FORMS["choice"]["choice"]


@pytest.mark.parametrize("is_async, preemption, caching",
                         list(itertools.product([False, True], ["recompute", "swap"], [True, False])))
def test_every_grammar_gives_in_every_mode_what_it_gives_alone(is_async, preemption, caching):
    engine = engine_of(num_blocks=14, num_host_blocks=40, preemption_mode=preemption, async_scheduling=is_async,
                       caching=caching, max_num_batched_tokens=13, long_prefill_token_threshold=4, max_num_seqs=6)
    for request_id, (prompt, params) in requests().items():
        engine.add(request_id, prompt, **params)
    engine.run(3000)
    assert engine.stats.num_preemptions > 0
    for request_id in requests():
        assert outcome(engine, request_id) == alone()[request_id], request_id
    engine.assert_idle()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_failed_step_changes_no_output(is_async):
    """Rows come back with outputs, which their grammars take again."""
    engine = engine_of(num_blocks=64, async_scheduling=is_async)
    for request_id in (1, 2, 3, 7):
        prompt, params = requests()[request_id]
        engine.add(request_id, prompt, **params)
    for _ in range(5):
        engine.step()
    engine.plan()
    engine.fail()
    engine.run()
    for request_id in (1, 2, 3, 7):
        assert outcome(engine, request_id) == alone()[request_id]
