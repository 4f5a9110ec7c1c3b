"""The prompts of `bench serve`: random tokens, with one or several shared prefixes, conversations of a ShareGPT file,
or lines of a file of one's own.

The same options and seed give the same prompts for every server. Lengths of texts are counted by --tokenizer, else by
the server's /tokenize, else guessed. A prompt is a list of ids or a text; with it goes max_tokens. Times nothing.
"""

import argparse
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.load_client import Client, Refused

Prompt = tuple[list[int] | str, int]
CountTokens = Callable[[str], Awaitable[int]]

CHARS_PER_TOKEN = 4  # a guess
SHAREGPT_LEAST, SHAREGPT_MOST, SHAREGPT_MOST_TOGETHER = 4, 1024, 2048  # tokens of a prompt or answer, and of both


def random_prompts(args: argparse.Namespace, seed: int | None = None) -> list[Prompt]:
    """Ids drawn from --token-ids, after a prefix that all share."""
    generator = random.Random(args.seed if seed is None else seed)
    low, high = args.token_ids

    def tokens(count: int) -> list[int]:
        return [generator.randint(low, high) for _ in range(count)]

    shared = tokens(args.shared_prefix)
    return [
        (shared + tokens(generator.randint(*args.prompt_tokens)), generator.randint(*args.output_tokens))
        for _ in range(args.num_requests)
    ]


def repeated_prefix_prompts(args: argparse.Namespace, seed: int) -> list[Prompt]:
    """Ids: each of a few prefixes in front of as many different suffixes, mixed."""
    generator = random.Random(seed)
    low, high = args.token_ids

    def tokens(count: int) -> list[int]:
        return [generator.randint(low, high) for _ in range(count)]

    found: list[Prompt] = []
    for _ in range(args.prefix_repetition_num_prefixes):
        prefix = tokens(args.prefix_repetition_prefix_len)
        for _ in range(args.num_requests // args.prefix_repetition_num_prefixes):
            found.append((prefix + tokens(args.prefix_repetition_suffix_len), args.prefix_repetition_output_len))
    if not args.disable_shuffle:
        generator.shuffle(found)
    return found


async def make_prompts(args: argparse.Namespace, client: Client, seed: int) -> list[Prompt]:
    """The measured requests of one load. Raises ValueError for a file that cannot be used, Refused for a server that
    has no /tokenize where only it knows the chat template."""
    if args.dataset_name == "random":
        return random_prompts(args, seed)
    if args.dataset_name == "prefix_repetition":
        return repeated_prefix_prompts(args, seed)
    rows = read_rows(args)
    if not args.disable_shuffle:
        random.Random(seed).shuffle(rows)
    read = sharegpt_prompts if args.dataset_name == "sharegpt" else custom_prompts
    prompts = await read(args, client, rows)
    if not prompts:
        raise ValueError(f"--dataset-path {args.dataset_path} has no usable request")
    if len(prompts) < args.num_requests and not args.no_oversample:
        prompts += random.Random(seed).choices(prompts, k=args.num_requests - len(prompts))
    return prompts


def read_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The objects of the file: a JSON list (sharegpt), or one a line. Raises ValueError."""
    try:
        text = Path(args.dataset_path).read_text(encoding="utf-8")
        is_list = args.dataset_name == "sharegpt"
        rows = json.loads(text) if is_list else [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"--dataset-path {args.dataset_path}: {reason}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"--dataset-path {args.dataset_path} holds something else than objects")
    return rows


async def sharegpt_prompts(args: argparse.Namespace, client: Client, rows: list[dict[str, Any]]) -> list[Prompt]:
    """First turns as prompts, as long an answer as the second turn has unless --output-len says how long. Very short
    and very long ones are left out."""
    count, found = token_counter(args, client), []
    given = args.sharegpt_output_len
    for row in rows:
        turns = [turn.get("value") for turn in row.get("conversations") or []][:2]
        if len(turns) < 2 or not all(isinstance(turn, str) for turn in turns):
            continue
        num_prompt = await count(turns[0])
        num_output = given or await count(turns[1])
        if (SHAREGPT_LEAST <= num_prompt <= SHAREGPT_MOST and (given or num_output >= SHAREGPT_LEAST)
                and num_prompt + num_output <= SHAREGPT_MOST_TOGETHER):
            found.append((turns[0], num_output))
        if len(found) == args.num_requests:
            break
    return found


async def custom_prompts(args: argparse.Namespace, client: Client, rows: list[dict[str, Any]]) -> list[Prompt]:
    """{"prompt", "output_tokens"} a line. Completions get the prompt through the chat template, which only the server
    has: its /tokenize gives the ids."""
    found: list[Prompt] = []
    for number, row in enumerate(rows[: args.num_requests]):
        prompt, num_output = row.get("prompt"), args.custom_output_len
        if num_output == -1:
            num_output = row.get("output_tokens")
        if not isinstance(prompt, str) or not isinstance(num_output, int) or num_output < 1:
            raise ValueError(f"--dataset-path {args.dataset_path}: {json.dumps(row)[:80]} lacks a prompt (text) or, "
                             "with --custom-output-len -1, output_tokens (integer above 0)")
        if client.is_chat or args.skip_chat_template:
            found.append((prompt, num_output))
            continue
        options = {"chat_template_kwargs": args.chat_template_kwargs} if args.chat_template_kwargs else {}
        try:
            ids = await client.tokenize(messages=[{"role": "user", "content": prompt}], add_generation_prompt=True,
                                        **options)
        except (Refused, ValueError) as error:
            raise ValueError(f"request {number}: the server's /tokenize does not apply its chat template ({error}); "
                             "use --skip-chat-template, or --backend openai-chat") from None
        found.append((ids, num_output))
    return found


def token_counter(args: argparse.Namespace, client: Client) -> CountTokens:
    """How long texts are. A server without /tokenize is asked once."""
    if args.tokenizer:
        tokenizer = load_tokenizer(args.tokenizer)

        async def by_tokenizer(text: str) -> int:
            return len(tokenizer.encode(text).ids)

        return by_tokenizer
    can_ask = True

    async def by_server(text: str) -> int:
        nonlocal can_ask
        if can_ask:
            try:
                return len(await client.tokenize(prompt=text))
            except (Refused, ValueError):
                can_ask = False
                print("the server has no /tokenize and no --tokenizer is given: lengths are guessed from characters")
        return guessed_tokens(text)

    return by_server


def guessed_tokens(text: str) -> int:
    """Where nobody can be asked."""
    return max(1, len(text) // CHARS_PER_TOKEN)


def load_tokenizer(name: str) -> Any:
    """A folder with tokenizer.json, that file, or a hub id. Raises ValueError."""
    from tokenizers import Tokenizer

    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    try:
        return Tokenizer.from_file(str(path)) if path.is_file() else Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"--tokenizer {name}: {str(error)[:200]}") from None
