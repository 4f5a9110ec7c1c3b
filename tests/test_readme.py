"""README says what the code does: its option table is the one of ipc/cli.py, its commands exist."""
from __future__ import annotations

import re
from pathlib import Path

from ipc.cli import GROUPS, Option, default_text

ROOT = Path(__file__).resolve().parents[1]


def option_row(option: Option) -> str:
    flag = f"{option.flag}, --no-{option.flag[2:]}" if option.parse is bool else option.flag
    choices = f": {', '.join(option.choices)}" if option.choices else ""
    default = default_text(option).strip().removeprefix("(default: ").removesuffix(")")
    return f"| `{flag}` | {option.help}{choices} | {default} |"


def option_table() -> str:
    rows = [option_row(option) for options in GROUPS.values() for option in options]
    return "\n".join(["| option | meaning | default |", "|---|---|---|", *rows])


def test_the_option_table_is_the_one_of_the_command_line() -> None:
    """When this fails, put the text of option_table() between the two marks."""
    text = (ROOT / "README.md").read_text()
    found = text.split("<!-- options -->\n")[1].split("\n<!-- /options -->")[0]
    assert found == option_table()


def test_every_bench_that_is_named_exists() -> None:
    names = set(re.findall(r"launch\.py bench ([a-z][\w-]*)", (ROOT / "README.md").read_text()))
    assert names
    for name in names:
        assert (ROOT / "bench" / f"{name.replace('-', '_')}.py").read_text().count("\ndef main(argv"), name


def test_every_file_that_is_named_exists() -> None:
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"`((?:ipc|engine_core|worker|frontend|bench)/[\w/]+\.(?:py|sh))`", text):
        assert (ROOT / path).exists(), path
