"""One model in the forms that other engines read: GGUF files of several types and a Hugging Face folder.

All forms hold the weights of one GGUF file, so that engines differ and the model does not. `random_folder` is a shape
without weights, for engines that make them up. Needs the package gguf; knows no engine.
"""
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from frontend.gguf_tokenizer import tokenizer_from_gguf
from ipc.aliases import find_alias
from ipc.gguf import read_gguf
from ipc.model_source import resolve_model

GGUF_TYPES = ("Q4_0", "Q8_0", "F32")
KEPT_TYPES = ("Q8_0", "F32")                    # never made coarser: norms, and the head of a 4-bit file


def _replace(path: Path, write: Any) -> Path:
    """Run write(part) and give the result its name, so that an interrupted run leaves nothing that looks whole."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        write(part)
        part.rename(path)
    return path


def gguf_file(source: str, ggml_type: str, folder: Path) -> Path:
    """The file with its quantized tensors as `ggml_type`, Q4_0, Q8_0 or F32. The first run makes it."""
    def write(part: Path) -> None:
        import gguf
        wanted = gguf.GGMLQuantizationType[ggml_type]
        reader = gguf.GGUFReader(source)
        architecture = reader.fields["general.architecture"].contents()
        writer = gguf.GGUFWriter(part, architecture)
        for name, field in reader.fields.items():
            if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
                element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), field.types[0], element)
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            is_kept = tensor.tensor_type.name in KEPT_TYPES and ggml_type != "F32"
            as_type = tensor.tensor_type if is_kept else wanted
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, as_type), raw_dtype=as_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return _replace(folder / f"{Path(source).stem.rsplit('.', 1)[0]}.{ggml_type}.gguf", write)


def _write_folder(part: Path, hf_config: dict[str, Any], source: str) -> None:
    """config.json and the tokenizer of a GGUF file."""
    part.mkdir(parents=True, exist_ok=True)
    (part / "config.json").write_text(json.dumps(hf_config))
    parts = tokenizer_from_gguf(read_gguf(source).metadata, source)
    parts.backend.save(str(part / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
              **parts.special_tokens}
    (part / "tokenizer_config.json").write_text(json.dumps(config))


def hf_folder(alias: str, folder: Path) -> Path:
    """The alias's GGUF file dequantized to float32 safetensors, with config.json and tokenizer."""
    def write(part: Path) -> None:
        from safetensors.torch import save_file

        from worker.models.loader import load_model
        files = resolve_model(alias)
        known = find_alias(alias)
        if known is None or files.kind != "gguf":
            raise ValueError(f"{alias}: expected an alias of a GGUF model")
        _write_folder(part, {**known.hf_config, "torch_dtype": "float32"}, files.path)
        slots = load_model(files, dtype="float32", device="cpu").checkpoint_slots()
        tensors = {name: slot.target.detach().contiguous() for name, slot in slots.items()}
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    return _replace(folder / f"{alias}-f32", write)


def random_folder(alias: str, tokenizer: str, folder: Path) -> Path:
    """config.json of the alias and the tokenizer of another GGUF file: what `--load-format dummy` needs."""
    known = find_alias(alias)
    if known is None:
        raise ValueError(f"{alias} is no alias")
    return _replace(folder / f"{alias}-random", lambda part: _write_folder(part, known.hf_config, tokenizer))


def default_folder() -> Path:
    return Path(os.environ.get("PEERS", "~/.cache/threefold/peers")).expanduser()
