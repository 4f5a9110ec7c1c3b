"""The rules that keep the three processes apart: who may import whom, twice; no unsafe loaders; no dead options."""
from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ipc import config as config_module

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ipc", "engine_core", "worker", "frontend")
PEER_BENCH = ROOT / "bench" / "vllm_core.py"    # measures what a peer puts on its own wire; runs where that peer lives
OURS = {*PACKAGES, "bench", "tests", "launch"}

HTTP = {"starlette", "uvicorn", "uvloop", "httptools", "h11"}
ALLOWED: dict[str, set[str]] = {                # besides the standard library and the package itself
    "ipc": {"msgspec", "zmq", "numpy"},
    "engine_core": {"numpy", "msgspec", "zmq", "ipc"},      # what ipc's messages and sockets are made of
    "worker": {"torch", "triton", "numpy", "numba", "llvmlite", "safetensors", "llguidance", "tokenizers", "msgspec",
               "zmq",
               "ipc"},
    "frontend": HTTP
    | {"rich", "tokenizers", "jinja2", "numpy", "prometheus_client", "huggingface_hub", "llguidance", "msgspec",
                        "zmq", "tqdm", "ipc"},
}
# Imported where they are needed only, never when the process starts.
LAZY: dict[str, set[str]] = {"ipc": {"huggingface_hub"}, "frontend": {"opentelemetry"}}

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}


def files_of(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def is_top_level(tree: ast.Module, node: ast.AST) -> bool:
    return any(node is statement or isinstance(statement, (ast.If, ast.Try)) and node in ast.walk(statement)
               for statement in tree.body)


def imports(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """(full name, statement) of every import, wherever it stands. A relative one is named ".": none is allowed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            yield ("." if node.level else node.module or ""), node


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def offences(package: str) -> list[str]:
    """Imports of a package that the table does not allow."""
    found = []
    for path in files_of(package):
        tree = parse(path)
        for name, node in imports(tree):
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top == package or top in ALLOWED[package]:
                continue
            if top in LAZY.get(package, ()) and not is_top_level(tree, node):
                continue
            found.append(f"{where(path, node)} imports {name}")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_the_table_allows(package):
    assert offences(package) == []


def test_the_walk_sees_every_kind_of_import(tmp_path):
    tree = ast.parse("import torch\nfrom worker.main import main\nif TYPE_CHECKING:\n    import triton.language\n"
                     "def f():\n    from . import x\n")
    assert [name for name, _ in imports(tree)] == ["torch", "worker.main", "triton.language", "."]


def test_bench_uses_no_private_names_of_the_packages():
    found = []
    for path in files_of("bench"):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
                found += [f"{where(path, node)}: {alias.name}" for alias in node.names if alias.name.startswith("_")]
    assert found == []


def test_launch_begins_with_the_standard_library_alone():
    """It sets up an environment in which nothing is installed yet."""
    tree = parse(ROOT / "launch.py")
    found = [name for name, node in imports(tree) if is_top_level(tree, node)
             and name.split(".")[0] not in sys.stdlib_module_names | {"ipc"}]
    assert found == []


# ---------------------------------------------------------------- and once more, by importing

FORBIDDEN_WHEN_RUNNING = {
    "engine_core.main": {"torch", "triton", "numba", "tokenizers", "jinja2", "starlette", "worker", "frontend"},
    "ipc.supervisor": {"torch", "triton", "numba", "tokenizers", "worker", "frontend", "engine_core"},
    "ipc.messages": {"torch", "worker", "frontend", "engine_core", "huggingface_hub"},
    "frontend": {"torch", "triton", "numba", "worker", "engine_core"},
    "frontend.main": {"torch", "triton", "numba", "worker", "engine_core"},
    "worker.main": {"engine_core", "frontend", "starlette"},
}


@pytest.mark.parametrize("module", FORBIDDEN_WHEN_RUNNING)
def test_a_fresh_interpreter_loads_only_what_its_process_may(module):
    code = (f"import sys, {module}; bad = {FORBIDDEN_WHEN_RUNNING[module]!r} & "
            "{name.split('.')[0] for name in sys.modules}; sys.exit(', '.join(sorted(bad)) or 0)")
    done = subprocess.run([sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{module} loads {done.stderr}"


# ---------------------------------------------------------------- what is nowhere

def unsafe(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    for name, node in imports(tree):
        if name.split(".")[0] in UNSAFE_MODULES:
            yield node, name
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in UNSAFE_CALLS:
                yield node, called.id
            if isinstance(called, ast.Attribute) and called.attr in ("load", "hub") and isinstance(
                    called.value, ast.Name) and called.value.id in ("torch", "joblib"):
                yield node, f"{called.value.id}.{called.attr}"
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and not (isinstance(keyword.value, ast.Constant)
                                                         and keyword.value.value is False):
                    yield node, "allow_pickle"
                if keyword.arg == "trust_remote_code":
                    yield node, "trust_remote_code"


def test_nothing_can_execute_what_it_loads():
    """No pickle in any form, no eval, no exec, no torch.load: not even behind a flag."""
    found = [f"{where(path, node)}: {what}" for path in [*files_of(*PACKAGES, "bench"), ROOT / "launch.py"]
             if path != PEER_BENCH
             for node, what in unsafe(parse(path))]
    assert found == []


@pytest.mark.parametrize("source", [
    "import pickle", "from marshal import loads", "def f():\n    import dill", "eval('1')", "exec('x')",
    "__import__('x')",
    "torch.load('x')", "numpy.load('x', allow_pickle=True)", "f(trust_remote_code=False)"])
def test_the_search_for_unsafe_loaders_finds_them(source):
    assert list(unsafe(ast.parse(source)))


def test_no_exception_is_swallowed_by_a_bare_except():
    found = [where(path, node) for path in [*files_of(*OURS - {"launch"}), ROOT / "launch.py"]
             for node in ast.walk(parse(path)) if isinstance(node, ast.ExceptHandler) and node.type is None]
    assert found == []


def test_no_assert_outside_tests_and_bench():
    """Checks must hold with python -O too."""
    found = [where(path, node) for path in [*files_of(*PACKAGES), ROOT / "launch.py"]
             for node in ast.walk(parse(path)) if isinstance(node, ast.Assert)]
    assert found == []


def test_core_and_worker_read_no_environment():
    """Options travel in config structs."""
    found = [where(path, node) for path in files_of("engine_core", "worker") for node in ast.walk(parse(path))
             if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")]
    assert found == []


def test_every_module_says_what_it_is():
    found = [str(path.relative_to(ROOT)) for path in [*files_of(*PACKAGES, "bench"), ROOT / "launch.py"]
             if not ast.get_docstring(parse(path))]
    assert found == []


# ---------------------------------------------------------------- no dead options

def config_structs() -> list[type]:
    return [value for value in vars(config_module).values() if isinstance(value, type)
            and issubclass(value, msgspec.Struct) and value.__module__ == config_module.__name__]


def names_read() -> set[str]:
    """Attributes read anywhere but where options are defined and parsed."""
    paths = [path for path in files_of(*PACKAGES)
             if path.relative_to(ROOT).as_posix() not in ("ipc/config.py", "ipc/cli.py")]
    return {node.attr for path in [*paths, ROOT / "launch.py"] for node in ast.walk(parse(path))
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def test_every_option_is_read_somewhere():
    read = names_read()
    dead = [f"{struct.__name__}.{name}" for struct in config_structs() for name in struct.__struct_fields__
            if name not in read]
    assert config_structs() and dead == []
