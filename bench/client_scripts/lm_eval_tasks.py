"""lm-eval: multiple choice through local-completions with token ids, generation through local-chat-completions.

argv: URL, model name, tokenizer folder, and a Hugging Face folder of the served model or "-". With a folder,
transformers scores the same requests, and no log-likelihood may be further off than 1e-3.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OPENAI_API_KEY="none")
URL, MODEL, TOKENIZER, FOLDER = sys.argv[1:5]
ROWS = [("The capital of France is", ["Paris", "Berlin", "blue"]), ("Two plus two equals", ["four", "red", "Rome"]),
        ("The sky is", ["blue", "seven", "wood"]), ("A dog is an", ["animal", "integer", "idea"])]
CHOICE = """task: toy_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""
GENERATE = """task: toy_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 8}}
metric_list: [{{metric: exact_match}}]
"""


def run(folder: str, task: str, model: str, settings: str, **options: Any) -> list[Any]:
    """The answers to every request of a task, in order."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    result = lm_eval.simple_evaluate(model=model, model_args=settings, tasks=[task], log_samples=True, batch_size=1,
                                     bootstrap_iters=0, task_manager=TaskManager(include_path=folder), **options)
    return [answer for sample in result["samples"][task] for answer in sample["resps"]]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, "rows.jsonl")
        with open(data, "w") as file:
            file.writelines(json.dumps({"question": q, "choices": c}) + "\n" for q, c in ROWS)
        for name, text in (("choice", CHOICE), ("generate", GENERATE)):
            with open(os.path.join(folder, f"{name}.yaml"), "w") as file:
                file.write(text.format(file=data))
        common = f"model={MODEL},tokenizer={TOKENIZER},num_concurrent=4,tokenized_requests=True,base_url={URL}"
        ours = run(folder, "toy_choice", "local-completions", f"{common}/v1/completions")
        answers = run(folder, "toy_generate", "local-chat-completions",
                      f"model={MODEL},num_concurrent=2,base_url={URL}/v1/chat/completions", apply_chat_template=True)
        assert len(ours) == 12 and all(isinstance(answer[0], str) for answer in answers)
        note = ""
        if FOLDER != "-":
            theirs = run(folder, "toy_choice", "hf", f"pretrained={FOLDER},dtype=float32", device="cpu")
            gaps = [abs(float(a[0][0]) - float(b[0][0])) for a, b in zip(ours, theirs, strict=True)]
            assert max(gaps) < 1e-3, gaps
            note = f", log-likelihoods within {max(gaps):.1e} of transformers'"
    print(f"lm-eval {importlib.metadata.version('lm_eval')}: ok{note}")


main()
