"""Grammars in the worker, with a model of random logits: what ends by its grammar is what the grammar describes."""
from __future__ import annotations

import json
import re
import select
import threading
import weakref
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
import torch

from ipc.errors import INVALID
from ipc.messages import GrammarPrepared, ModelRunnerOutput, NewRow, PrepareGrammar, SchedulerOutput
from ipc.sampling_params import SamplingParams
from ipc.structured_outputs import StructuredOutputs
from worker.attention.registry import get_backend
from worker.grammar_calls import GrammarCalls
from worker.kv_pool import KVPool
from worker.model_runner import ModelRunner
from worker.sampling.grammar import Grammars
from worker.sampling.grammar_vocabulary import byte_vocabulary, from_gguf

VOCAB, EOS, LENGTH = 259, 258, 400
POINT = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "integer"}}, "required": ["x", "y"],
         "additionalProperties": False}
SCHEMAS: list[Any] = [
    {"type": "integer"},
    {"type": "integer", "minimum": -3, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": 5, "multipleOf": 3},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "boolean"},
    {"type": "null"},
    {"const": {"a": [1, 2]}},
    {"enum": ["red", "green", 3, None]},
    {"type": "string", "minLength": 2, "maxLength": 9},
    {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]{1,3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": ["string", "null"], "maxLength": 6},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
    POINT,
    {"type": "array", "items": POINT, "minItems": 1, "maxItems": 2},
    {"type": "object", "properties": {"tag": {"type": "string", "maxLength": 4}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/p"}}, "required": ["a"], "additionalProperties": False,
     "$defs": {"p": POINT}},
    {"$defs": {"n": {"type": "object", "properties": {"v": {"type": "boolean"}, "next": {
        "anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}},
        "required": ["v", "next"], "additionalProperties": False}},
     "$ref": "#/$defs/n"},
    {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 99}]},
    {"oneOf": [{"const": "yes"}, {"const": "no"}]},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
               {"properties": {"b": {"type": "null"}}, "required": ["b"]}], "maxProperties": 2,
     "additionalProperties": False, "properties": {"a": {}, "b": {}}},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "boolean"}}, "additionalProperties": False,
     "required": ["k1"]},
    {"type": "object", "properties": {"ünï": {"enum": ["ä", "日本"]}}, "required": ["ünï"],
     "additionalProperties": False},
]


class RandomModel:
    """Logits [L, V] are random, printable characters likelier; hidden is only the input's position in the table."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.table = torch.randn(1009, VOCAB, generator=generator)
        self.table[:, 32:127] += 2.0
        self.config = type("Config", (), {"vocab_size": VOCAB})

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        hidden = ((ids * 31 + positions * 7) % 1009)[:, None].float()
        return hidden if rest[-1] is None else hidden[rest[-1].rows]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.table[hidden[:, 0].long()].clone()


class Rows:
    """A runner with one row for each request, all begun at once and run to their end."""

    def __init__(self, *requests: SamplingParams, vocabulary: Any = None) -> None:
        model: Any = RandomModel()
        backend: Any = get_backend("reference")
        pool = KVPool(backend, 1, LENGTH, (1, 1, 2), torch.float32)
        self.runner = ModelRunner(model, backend, pool, 0, seats=len(requests), max_tokens=1024, max_model_len=LENGTH,
                                  eos_token_ids=[EOS])
        self.runner.grammars = Grammars(vocabulary or (lambda: byte_vocabulary(VOCAB, [EOS])))
        self.texts = [bytearray() for _ in requests]
        self.ends: dict[int, str] = {}
        self.messages: dict[int, str] = {}
        self.requests = requests

    def run(self, num_steps: int = LENGTH - 2) -> None:
        n = len(self.requests)
        new = [NewRow(i + 1, 1, 1, 0, 1, params) for i, params in enumerate(self.requests)]
        self._enter(self.runner.execute(SchedulerOutput(
            1, n, new=new, new_tokens=np.full(n, 65, np.int32).data.cast("B"),
            new_blocks=np.ones(n, np.int32).data.cast("B"))))
        for step in range(2, num_steps + 1):
            if len(self.ends) == n:
                return
            self._enter(self.runner.execute(SchedulerOutput(step, n)))

    def _enter(self, output: ModelRunnerOutput) -> None:
        failed = {failure.row: failure for failure in output.failed}
        for row, token in enumerate(np.frombuffer(output.tokens, np.int32).tolist()):
            if row in self.ends:
                continue
            if row in failed:
                assert failed[row].error_code == INVALID
                self.ends[row], self.messages[row] = "failed", failed[row].message
            elif token == EOS:
                self.ends[row] = "eos"
            else:
                self.texts[row].append(token)
        for row in np.frombuffer(output.ended_rows, np.int32).tolist():
            self.ends.setdefault(row, "grammar")


def params_of(seed: int = 0, **form: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=None, structured_outputs=StructuredOutputs(**form))


def test_every_finished_output_of_a_schema_parses_and_validates():
    specs = [(schema, seed) for schema in SCHEMAS for seed in range(3)]
    rows = Rows(*(params_of(seed, json=json.dumps(schema)) for schema, seed in specs))
    rows.run()
    num_finished = 0
    for row, (schema, _) in enumerate(specs):
        if row in rows.ends:
            assert rows.ends[row] in ("eos", "grammar"), (schema, rows.messages.get(row))
            value = json.loads(rows.texts[row].decode())
            jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
            num_finished += 1
    assert len(SCHEMAS) >= 25 and num_finished >= 0.9 * len(specs)


def test_json_object_gives_an_object():
    rows = Rows(*(params_of(seed, json_object=True) for seed in range(6)))
    rows.run()
    assert rows.ends
    assert all(isinstance(json.loads(rows.texts[row].decode()), dict) for row in rows.ends)


def test_a_regex_is_matched_and_a_choice_is_chosen():
    choices = ["yes", "yes, but \"no\"", "naïve", "a\nb", "/slash\\"]
    patterns = [r"[0-9]{3}/[a-f]+x", r"(ab|cd)*e", r"a\/b"]
    rows = Rows(*(params_of(seed, choice=choices) for seed in range(8)),
                *(params_of(seed, regex=pattern) for pattern in patterns for seed in range(2)))
    rows.run()
    found = [text.decode() for text in rows.texts]
    assert len(rows.ends) == len(rows.requests)
    assert set(found[:8]) <= set(choices) and len(set(found[:8])) > 1
    for index, text in enumerate(found[8:]):
        assert re.fullmatch(patterns[index // 2], text), text


@pytest.mark.parametrize("grammar", ['start: "a" INT\nINT: /[0-9]{2}/', 'root ::= "a" [0-9] [0-9]'],
                         ids=["lark", "gbnf"])
def test_a_grammar_in_either_notation_is_followed(grammar):
    rows = Rows(params_of(grammar=grammar))
    rows.run()
    assert re.fullmatch("a[0-9]{2}", rows.texts[0].decode()) and rows.ends == {0: "grammar"}


def test_a_structural_tag_binds_the_text_behind_its_trigger():
    tag = {"structures": [{"begin": "!f=", "schema": POINT, "end": ";"}, {"begin": "!g=", "schema": {"const": 1},
                                                                       "end": ";"}], "triggers": ["!"]}
    rows = Rows(*(params_of(seed, structural_tag=json.dumps(tag)) for seed in range(4)))
    rows.run(200)
    texts = [text.decode("utf-8", "replace") for text in rows.texts]
    assert any("!" in text for text in texts)
    for text in texts:
        pieces = re.split("!", text)[1:]
        for piece in pieces[:-1]:
            assert re.match(r"f=\{[^;]*\};|g=1;", piece), piece


def test_the_end_is_open_when_the_grammar_may_stop_or_go_on():
    rows = Rows(*(params_of(seed, regex="a{1,30}") for seed in range(20)))
    rows.run()
    assert set(rows.ends.values()) <= {"eos", "grammar"} and "eos" in rows.ends.values()


def test_rows_without_a_grammar_are_unchanged_beside_one():
    free = SamplingParams(temperature=1.0, seed=3, max_tokens=None)
    alone, mixed = Rows(free), Rows(free, params_of(regex="[0-9]{40}"))
    alone.run(30)
    mixed.run(30)
    assert alone.texts[0] == mixed.texts[0] and re.fullmatch(b"[0-9]+", mixed.texts[1])


@pytest.mark.parametrize("form, words", [
    (dict(json='{"type": "array", "uniqueItems": true}'), "uniqueItems"), (dict(json="{"), "JSON"),
    (dict(regex="[a"), "regex"), (dict(grammar="start: ("), "Expected"), (dict(grammar="root ::= ("), ""),
    (dict(regex="(?P<a>x)(?=y)"), ""), (dict(structural_tag='{"structures": 1}'), "structural_tag")])
def test_a_grammar_that_does_not_compile_ends_its_own_request_only(form, words):
    rows = Rows(params_of(regex="[0-9]{5}"), params_of(**form), params_of(choice=["ok"]))
    rows.run()
    assert rows.ends == {0: "grammar", 1: "failed", 2: "grammar"}
    assert words in rows.messages[1] and rows.messages[1].startswith("structured_outputs: ")


def test_a_grammar_that_needs_what_the_vocabulary_lacks_fails_with_a_reason():
    from worker.sampling.grammar_vocabulary import from_table
    rows = Rows(params_of(choice=["b"]), vocabulary=lambda: from_table([b"a"] * EOS + [b""], [], [EOS]))
    rows.run()
    assert rows.ends == {0: "failed"}


def test_compiled_grammars_are_kept_within_their_bytes():
    grammars = Grammars(lambda: byte_vocabulary(VOCAB, [EOS]), cache_bytes=5_000_000)
    first = grammars.compile(b"0", StructuredOutputs(regex="0"))
    assert grammars.compile(b"0", StructuredOutputs(regex="0")) is first
    for number in range(1, 9):
        grammars.compile(b"%d" % number, StructuredOutputs(regex=str(number))).result()
    assert grammars._cached_bytes <= 5_000_000
    assert grammars.compile(b"0", StructuredOutputs(regex="0")) is not first


def test_what_is_pushed_out_is_freed_by_the_compiling_thread():
    """A step waited for it, 3 ms for a large one."""
    grammars = Grammars(lambda: byte_vocabulary(VOCAB, [EOS]), cache_bytes=1)
    threads: list[str] = []
    weakref.finalize(grammars.compile(b"0", StructuredOutputs(regex="0")),
                     lambda: threads.append(threading.current_thread().name))
    for number in (1, 2, 3):
        grammars.compile(b"%d" % number, StructuredOutputs(regex=str(number))).result()
    assert len(threads) == 1 and threads[0].startswith("compile-grammars")


def test_a_gguf_vocabulary_reads_its_characters_as_bytes():
    tokenizer = from_gguf({"tokenizer.ggml.tokens": ["Ġa", "Ã", "¤", "<|end|>", "<tool>"],
                           "tokenizer.ggml.token_type": [1, 1, 1, 3, 4]}, 8, [3])
    assert tokenizer.decode_bytes([0, 1, 2, 4]) == " aä<tool>".encode()
    assert tokenizer.is_special_token(3) and not tokenizer.is_special_token(4)
    assert tokenizer.vocab_size == 8


def test_min_tokens_holds_back_the_end_but_not_that_of_the_grammar():
    def params(**form: Any) -> SamplingParams:
        return params_of(**form).replace(min_tokens=12)
    rows = Rows(*(params(regex="[ab]{1,300}").replace(seed=seed) for seed in range(6)), params(choice=["short"]))
    rows.run()
    assert all(len(text) >= 11 for text in rows.texts[:6])
    assert rows.texts[6] == b"short" and rows.ends[6] == "grammar"


def test_a_grammar_that_becomes_too_complex_ends_its_row_with_an_error_and_one_line_of_log(caplog):
    """It was taken for the grammar's end, so the caller got a broken output as a finished one."""
    rows = Rows(params_of(regex="(a{1,9999}){9999}"), params_of(choice=["ok"]))
    rows.run()
    assert rows.ends == {0: "failed", 1: "grammar"} and "too complex: " in rows.messages[0]
    (record,) = [record for record in caplog.records if "refused a token" in record.message]
    assert "\n" not in record.message and "non-verbose" not in record.message


def answers_of(calls: GrammarCalls, count: int) -> list[GrammarPrepared]:
    found: list[GrammarPrepared] = []
    while len(found) < count:
        assert select.select([calls.fd], [], [], 20.0)[0]
        found += calls.take()
    return found


def test_a_grammar_is_compiled_beside_the_loop_and_kept_for_the_row_that_comes():
    calls, grammars = GrammarCalls(), Grammars(lambda: byte_vocabulary(VOCAB, [EOS]))
    specs = [StructuredOutputs(regex="[0-9]{3}"), StructuredOutputs(regex="[")]
    keys = [msgspec.msgpack.encode(spec) for spec in specs]
    for call, key in enumerate(keys):
        calls.handle(PrepareGrammar(call, memoryview(key)), grammars)
    good, bad = sorted(answers_of(calls, 2), key=lambda answer: answer.call_id)
    assert (good.call_id, good.problem, bad.call_id) == (0, "", 1) and "regex" in bad.problem
    kept = grammars.compile(keys[0], specs[0])
    assert kept.done()
    calls.handle(PrepareGrammar(2, memoryview(keys[0])), grammars)
    calls.handle(PrepareGrammar(3, memoryview(b"\xc1")), grammars)
    calls.handle(PrepareGrammar(4, memoryview(keys[0])), None)          # the worker sleeps
    assert [(answer.call_id, bool(answer.problem)) for answer in answers_of(calls, 3)] == [
        (2, False), (3, True), (4, False)]
    calls.handle(PrepareGrammar(5, memoryview(keys[0])), grammars)
    calls.forget()                              # the core that asked has ended
    calls.handle(PrepareGrammar(1, memoryview(keys[0])), grammars)
    assert [answer.call_id for answer in answers_of(calls, 1)] == [1]
