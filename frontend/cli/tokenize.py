"""`launch.py tokenize`: what a text, or a chat, is for a model: its token ids and their pieces. Starts no engine.

    id     piece
    504    "The"
    4253   " capital"
"""
from __future__ import annotations

import json
import sys
from typing import Any

from frontend.chat_template import ChatTemplate
from frontend.cli.common import UsageError, engine_config, make_command_parser, parse_command, read_input, run_command
from frontend.tokenizer import Tokenizer
from frontend.tokenizer_files import save_tokenizer
from ipc.aliases import DEMO_ALIAS
from ipc.screen import Screen


def chat_messages(text: str) -> list[dict[str, Any]]:
    """A JSON list of messages, or an object that has one; any other text is one user message. Raises UsageError."""
    if text.lstrip()[:1] not in ("[", "{"):
        return [{"role": "user", "content": text}]
    try:
        value = json.loads(text)
    except ValueError:
        return [{"role": "user", "content": text}]
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UsageError('the JSON has no messages; write [{"role": "user", "content": "Hi"}] or {"messages": [...]}')
    return messages


def parse_ids(text: str) -> list[int]:
    """`1, 2 3` or `[1, 2, 3]`. Raises UsageError."""
    words = text.replace("[", " ").replace("]", " ").replace(",", " ").split()
    try:
        return [int(word) for word in words]
    except ValueError:
        wrong = next(word for word in words if not word.lstrip("-").isdigit())
        raise UsageError(f"--decode takes token ids, and {wrong[:40]!r} is none") from None


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text of each token; bytes that are no whole character are shown as \\xNN."""
    return [tokenizer.token_bytes(index).decode("utf-8", "backslashreplace") for index in ids]


def print_table(ids: list[int], texts: list[str]) -> None:
    width = max((len(str(index)) for index in ids), default=2) + 2
    print(f"{'id':<{width}} piece")
    for index, text in zip(ids, texts):
        shown = json.dumps(text, ensure_ascii=False).replace("\\\\x", "\\x")
        print(f"{index:<{width}} {shown}")
    print(f"{len(ids)} tokens")


def main(argv: list[str]) -> int:
    parser, group = make_command_parser("tokenize", "Show the tokens of a text.", takes_model=False)
    parser.add_argument("text", nargs="*", metavar="TEXT",
                        help="words are joined by blanks; - or nothing: standard input")
    group.add_argument("--chat", action="store_true", default=False,
                       help="TEXT is a user message, or JSON messages; shows what the chat template makes of it")
    group.add_argument("--decode", action="store_true", default=False, help="TEXT is token ids; shows their text")
    group.add_argument("--no-special-tokens", action="store_true", default=False, help="add none in front or behind")
    group.add_argument("--count", action="store_true", default=False, help="print only the number of tokens")
    group.add_argument("--save", metavar="DIR", help="write the tokenizer as a Hugging Face folder, and nothing else")
    group.add_argument("--json", action="store_true", default=False, help="print one JSON object")

    def command() -> int:
        model, engine, own = parse_command(parser, argv)
        if own["chat"] and own["decode"]:
            raise UsageError("--chat and --decode exclude each other")
        text = "" if own.get("save") else read_input(own.get("text", ()), "a text")
        files = engine_config(model or DEMO_ALIAS, engine, Screen()).model.files
        tokenizer = Tokenizer.from_files(files)
        if own.get("save"):
            save_tokenizer(tokenizer, files.config, own["save"])
            print(own["save"])
            return 0
        if own["decode"]:
            ids = parse_ids(text)
            text = tokenizer.decode(ids, skip_special_tokens=False)
        elif own["chat"]:
            template = ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens)
            text = template.render(chat_messages(text))
            ids = tokenizer.encode_ids(text, False)
        else:
            ids = tokenizer.encode_ids(text, not own["no_special_tokens"])
        texts = pieces(tokenizer, ids)
        if own["count"]:
            print(len(ids))
        elif own["json"]:
            print(json.dumps({"model": files.served_name, "count": len(ids), "tokens": ids, "token_strs": texts,
                              "text": text}, ensure_ascii=False))
        elif own["decode"]:
            print(text)
        else:
            print_table(ids, texts)
        return 0
    return run_command("tokenize", command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
