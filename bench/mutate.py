"""`bench mutate`: does a test notice? Known bugs seeded one by one, and random mutants of the core's code.

Each change is made in a copy of the tree, then the killers run: a short content-checked simulation first, then the unit
tests of the core and of the worker's batch. A mutant that survives everything is listed; bench/mutants.md says why
each is harmless. `--known` runs the list of known bugs (all must be caught), `--random N --seed S` N random mutants.
"""

from __future__ import annotations

import ast
import concurrent.futures
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from bench.known_bugs import KNOWN_BUGS
from bench.stats import print_json
from ipc.option_help import OptionParser

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGETS = (
    "engine_core/scheduler.py",
    "engine_core/block_manager.py",
    "engine_core/admission.py",
    "engine_core/rows.py",
    "engine_core/update.py",
    "engine_core/speculation.py",
    "worker/batch.py",
    "worker/request_state.py",
)
COPIED = ("ipc", "engine_core", "worker", "frontend", "bench", "tests", "launch.py", "pyproject.toml", "README.md")
TESTS = (
    "tests/engine_core",
    "tests/worker/test_batch.py",
    "tests/worker/test_request_state.py",
    "tests/worker/test_spec_decode.py",
    "tests/properties",
    "tests/equivalence/test_milestone.py",
    "tests/equivalence/test_async_equals_sync.py",
)
SIMULATE = """
from bench.simulation import Options, simulate
from ipc.option_help import OptionParser
for seed in range({first}, {first} + 60):
    simulate(seed, Options(max_rounds=4000))
for seed in range({first} + 60, {first} + 110):
    simulate(seed, Options(max_rounds=4000, fault_rate=0.05, loss_rate=0.002, late_rate=0.01, nan_rate=0.01))
"""
SIMULATE_S, TESTS_S = 90, 240  # a mutant that never ends is caught too


class Mutant(NamedTuple):
    """A change of one file."""

    name: str
    path: str
    text: str  # the whole mutated file


class Outcome(NamedTuple):
    name: str
    killer: str  # "" : it survived


# ---------------------------------------------------------------- random mutants

_COMPARE = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_BINARY = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_SKIPPED_FUNCTIONS = ("check_invariants", "__repr__")


def candidates(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """(node, kind of change) for every place that can be mutated; not in annotations, docstrings, messages, checks."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        inner: list[ast.AST] = []
        if isinstance(node, ast.FunctionDef):
            if node.name in _SKIPPED_FUNCTIONS:
                inner = [node]
            else:
                inner = [a.annotation for a in ast.walk(node.args) if isinstance(a, ast.arg) and a.annotation]
                inner += [node.returns] if node.returns else []
        elif isinstance(node, (ast.Raise, ast.AnnAssign)):
            inner = [node] if isinstance(node, ast.Raise) else [node.annotation]
        for part in inner:
            skipped.update(id(n) for n in ast.walk(part))
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
            yield node, "compare"
        elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            yield node, "binary"
        elif isinstance(node, ast.AugAssign) and type(node.op) in _BINARY:
            yield node, "augmented"
        elif isinstance(node, ast.BoolOp):
            yield node, "bool"
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield node, "constant"
        elif isinstance(node, (ast.If, ast.While)):
            yield node, "negate"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, "delete"
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
            yield node, "delete"


def mutate(node: ast.AST, kind: str) -> None:
    """Change the node in place."""
    if kind == "compare" and isinstance(node, ast.Compare):
        node.ops[0] = _COMPARE[type(node.ops[0])]()
    elif kind in ("binary", "augmented") and isinstance(node, (ast.BinOp, ast.AugAssign)):
        node.op = _BINARY[type(node.op)]()
    elif kind == "bool" and isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif kind == "constant" and isinstance(node, ast.Constant):
        node.value = int(str(node.value)) + 1
    elif kind == "negate" and isinstance(node, (ast.If, ast.While)):
        node.test = ast.UnaryOp(ast.Not(), node.test)


class _Delete(ast.NodeTransformer):
    def __init__(self, target: ast.AST) -> None:
        self.target = target

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.Pass() if node is self.target else super().visit(node)


def random_mutants(count: int, seed: int) -> list[Mutant]:
    """`count` different mutants, the same for the same seed and sources."""
    places = []
    for path in TARGETS:
        with open(os.path.join(ROOT, path)) as file:
            tree = ast.parse(file.read())
        places += [(path, index) for index, _ in enumerate(candidates(tree))]
    chosen = random.Random(seed).sample(places, min(count, len(places)))
    mutants = []
    for path, index in chosen:
        with open(os.path.join(ROOT, path)) as file:
            tree = copy.deepcopy(ast.parse(file.read()))
        node, kind = list(candidates(tree))[index]
        before = ast.unparse(node).split("\n")[0]
        if kind == "delete":
            _Delete(node).visit(tree)
            after = "pass"
        else:
            mutate(node, kind)
            after = ast.unparse(node).split("\n")[0]
        text = ast.unparse(ast.fix_missing_locations(tree))
        mutants.append(Mutant(f"{path}:{getattr(node, 'lineno', 0)}: {before}  ->  {after}", path, text))
    return mutants


def known_mutants() -> list[Mutant]:
    """The list of known bugs. Raises RuntimeError when the code has changed and a bug no longer applies."""
    mutants = []
    for bug in KNOWN_BUGS:
        with open(os.path.join(ROOT, bug.path)) as file:
            text = file.read()
        if text.count(bug.old) != 1:
            raise RuntimeError(f"known bug {bug.name!r}: its text occurs {text.count(bug.old)} times in {bug.path}")
        mutants.append(Mutant(bug.name, bug.path, text.replace(bug.old, bug.new)))
    return mutants


# ---------------------------------------------------------------- running one


def run(mutant: Mutant, first_seed: int) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="tf-mutant-") as folder:
        for name in COPIED:
            source, target = os.path.join(ROOT, name), os.path.join(folder, name)
            if os.path.isdir(source):
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "results"))
            elif os.path.exists(source):
                shutil.copy(source, target)
        with open(os.path.join(folder, mutant.path), "w") as file:
            file.write(mutant.text)
        stages = (
            ("simulation", [sys.executable, "-c", SIMULATE.format(first=first_seed)], SIMULATE_S),
            ("tests", [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *TESTS], TESTS_S),
        )
        env = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        for name, command, limit in stages:
            try:
                done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=limit)
            except subprocess.TimeoutExpired:
                return Outcome(mutant.name, f"{name} (endless)")
            if done.returncode:
                lines = (done.stdout + done.stderr).strip().splitlines()
                failed = next((line for line in lines if line.startswith("FAILED")), lines[-1] if lines else "")
                return Outcome(mutant.name, f"{name}: {failed[:160]}")
    return Outcome(mutant.name, "")


def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(prog="launch.py bench mutate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--known", action="store_true", help="the list of known bugs")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N random mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="write every outcome")
    args = parser.parse_args(argv)
    mutants = (known_mutants() if args.known or not args.random else []) + random_mutants(args.random, args.seed)
    outcomes: list[Outcome] = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for outcome in pool.map(lambda m: run(m, 0), mutants):
            outcomes.append(outcome)
            print(f"{'killed  ' if outcome.killer else 'SURVIVED'} {outcome.name}   {outcome.killer}", flush=True)
    killed = sum(bool(o.killer) for o in outcomes)
    result = {
        "mutants": len(outcomes),
        "killed": killed,
        "share": round(killed / max(1, len(outcomes)), 3),
        "survivors": [o.name for o in outcomes if not o.killer],
    }
    if args.json:
        import json

        with open(args.json, "w") as file:
            json.dump({**result, "outcomes": [o._asdict() for o in outcomes]}, file, indent=1)
    print_json(result)
    return 0 if killed == len(outcomes) or (args.random and killed >= 0.9 * len(outcomes)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
