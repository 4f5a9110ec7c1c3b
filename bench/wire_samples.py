"""One message of every kind with every field set: what wire fixtures and the wire fuzzer start from.

Values are made from the types, so a new field needs nothing here.
"""
from __future__ import annotations

import types
import typing
from typing import Any

import msgspec
import numpy as np

from ipc.messages import KINDS
from ipc.model_config import ModelConfig

MODEL = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, rope_theta=10000.0,
    rope_scaling={"rope_type": "linear", "factor": 2.0}, max_position_embeddings=512, tie_word_embeddings=False,
    attention_bias=False, qk_norm=False, eos_token_ids=[299], bos_token_id=None, dtype="float32")

# Fields with a check that the value of their type does not pass, and those worth a particular value.
CHOSEN: dict[tuple[str, str], Any] = {
    ("CacheConfig", "swap_space"): 1 << 20, ("SchedulerConfig", "policy"): "priority",
    ("SchedulerConfig", "preemption_mode"): "swap", ("ModelSection", "dtype"): "float32",
    ("SamplingParams", "seed"): (1 << 64) - 1, ("EngineConfig", "log_level"): "debug", ("EngineConfig",
                                                                                        "device"): "cpu",
    ("ModelFiles", "config"): MODEL, ("ModelFiles", "kind"): "dummy",
    ("AddRequest", "request_id"): (1 << 40) + 7, ("AddRequest", "priority"): -2,
}


def column(*values: int, dtype: type = np.int32) -> memoryview:
    return np.array(values, dtype).data.cast("B")


def value_of(tp: Any, name: str) -> Any:
    """A value of this type that differs from usual defaults."""
    origin, arguments = typing.get_origin(tp), [a for a in typing.get_args(tp) if a is not type(None)]
    if origin in (typing.Union, types.UnionType):
        return value_of(arguments[0], name)
    if origin is list:
        return [value_of(arguments[0], name)]
    if origin is tuple:
        return tuple(value_of(a, name) for a in arguments if a is not ...)
    if origin is dict:
        return {value_of(arguments[0], name): value_of(arguments[1], name)}
    if origin is typing.Literal:
        return arguments[-1]
    simple: dict[Any, Any] = {int: len(name), float: 0.5, str: name, bytes: name.encode(), bool: True, Any: 1,
                              memoryview: column(1, -1, len(name)), dict: {name: 1}, list: [1],
                              msgspec.Raw: msgspec.Raw(msgspec.msgpack.encode({name: 1}))}
    return simple[tp] if tp in simple else filled(tp)


def choose(tp: type, name: str, hint: Any) -> Any:
    return CHOSEN[tp.__name__, name] if (tp.__name__, name) in CHOSEN else value_of(hint, name)


def filled(tp: type) -> Any:
    """An instance with every field set. A value that a check refuses leaves the default, if there is one."""
    hints = typing.get_type_hints(tp)
    values: dict[str, Any] = {}
    optional = []
    for field in msgspec.structs.fields(tp):
        is_required = field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT
        if is_required:
            values[field.name] = choose(tp, field.name, hints[field.name])
        else:
            optional.append(field)
    for field in optional:
        value = choose(tp, field.name, hints[field.name])
        if value is True and field.default is True:
            value = False
        try:
            tp(**values, **{field.name: value})
        except ValueError:
            continue
        values[field.name] = value
    return tp(**values)


def samples() -> list[Any]:
    """In order of kind."""
    return [filled(KINDS[kind]) for kind in sorted(KINDS)]
