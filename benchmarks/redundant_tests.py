"""Which tests add neither a line, nor a branch, nor a fault that they alone notice.

    pip install pytest-cov
    python benchmarks/redundant_tests.py measure tests/actor --data actor.coverage
    python benchmarks/redundant_tests.py plan --data actor.coverage --plan actor.txt
    python benchmarks/redundant_tests.py mutate --data actor.coverage --plan actor.txt --rooms serl_chunk/actor
    python benchmarks/redundant_tests.py delete --plan actor.txt

`plan` chooses functions, few lines first, until every line and branch that any reaches is reached: `+`. `!` are chosen
in any case: properties, and what is named in GUARDED. The others have a `-`. `mutate` changes the rooms in one place
at a time: where the chosen functions that reach it pass, and others fail, one of those becomes `+`. Read the plan, and
change marks, before `delete` removes what has a `-`. A mutation runs in a fork of one process that has imported the
libraries, in this checkout: change nothing in it meanwhile.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import re
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (ROOT / "serl_chunk", ROOT / "packages" / "serl-chunk-robot" / "serl_chunk_robot")
GUARDED = re.compile(r"interleav|kill|parity|planted|wheel|evil|fuzz|stop|watchdog", re.IGNORECASE)
LIBRARIES = ("jax", "flax", "optax", "h5py", "zmq", "gymnasium", "PIL", "matplotlib", "hypothesis", "pytest")
PATIENCE = 400  # seconds of one mutation
NEW = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
       ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip


class Test(NamedTuple):
    """A test function."""

    file: str
    name: str  # Class::name for a method

    @property
    def node(self) -> str:
        return f"{self.file}::{self.name}"


Reached = dict[Test, set[tuple[str, int, int]]]  # file of the product, and a branch from a line to a line


def measure(paths: list[str], data: Path) -> int:
    """Run tests under coverage, with a context for each."""
    config = data.with_suffix(".rc")
    config.write_text("[run]\nbranch = True\n")
    command = [
        sys.executable, "-m", "pytest", *paths, *(f"--cov={p}" for p in PACKAGES), f"--cov-config={config}",
        "--cov-context=test", "--cov-report=",
    ]  # fmt: skip
    return subprocess.call(command, cwd=ROOT, env={**os.environ, "COVERAGE_FILE": str(data.absolute())})


def reached(data: Path) -> Reached:
    """Return the branches of each test function."""
    found: Reached = defaultdict(set)
    query = (
        "select file.path, context.context, arc.fromno, arc.tono from arc "
        "join file on file.id = arc.file_id join context on context.id = arc.context_id"
    )
    with contextlib.closing(sqlite3.connect(data)) as connection:
        for path, context, first, last in connection.execute(query):
            file, _, name = context.partition("|")[0].partition("::")
            if name:
                found[Test(file, name.partition("[")[0])].add((os.path.relpath(path, ROOT), first, last))
    return found


def functions(file: str) -> dict[str, tuple[int, int, bool]]:
    """Return the test functions of a file: name -> first and last line, and whether it is a property."""

    def visit(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, tuple[int, int, bool]]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body, f"{node.name}::")
            elif isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                decorated = [ast.unparse(d) for d in node.decorator_list]
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                given = any(text.startswith("given") for text in decorated)
                yield f"{prefix}{node.name}", (first, node.end_lineno or first, given)

    return dict(visit(ast.parse((ROOT / file).read_text()).body, ""))


def plan(data: Path, file: Path) -> None:
    """Write the plan of a measurement."""
    found = reached(data)
    places = {path: functions(path) for path in sorted({test.file for test in found})}
    left = {test: branches for test, branches in found.items() if test.name in places[test.file]}
    marks, have = {}, set[tuple[str, int, int]]()
    for test, branches in left.items():
        if places[test.file][test.name][2] or GUARDED.search(test.node):
            marks[test], have = "!", have | branches

    def worth(test: Test) -> float:
        first, last, _ = places[test.file][test.name]
        return len(left[test] - have) / (last - first + 4)

    while others := [test for test in left if test not in marks and left[test] - have]:
        best = max(others, key=worth)
        marks[best], have = "+", have | left[best]
    for test in left:
        marks.setdefault(test, "-")
    write_plan(file, marks)
    lines = {mark: sum(places[t.file][t.name][1] - places[t.file][t.name][0] + 1 for t in marks if marks[t] == mark)
             for mark in "!+-"}  # fmt: skip
    print(f"{len(marks)} functions; lines guarded {lines['!']}, chosen {lines['+']}, redundant {lines['-']}")


def write_plan(file: Path, marks: dict[Test, str]) -> None:
    """Write marks, a line each."""
    file.write_text("".join(f"{mark} {test.node}\n" for test, mark in sorted(marks.items())))


def read_plan(file: Path) -> dict[Test, str]:
    """Read what `write_plan` wrote."""
    rows = (line.split(" ", 1) for line in file.read_text().splitlines() if line)
    return {Test(*node.split("::", 1)): mark for mark, node in rows}


def sites(tree: ast.Module) -> list[tuple[ast.AST, str]]:
    """Return the nodes that can be changed, with how."""
    found: list[tuple[ast.AST, str]] = []
    for node in ast.walk(tree):
        match node:
            case ast.Compare():
                found.append((node, "compare"))
            case ast.BoolOp() | ast.BinOp(op=ast.Add() | ast.Sub()) | ast.AugAssign(op=ast.Add() | ast.Sub()):
                found.append((node, "operator"))
            case ast.Constant(value=bool() | int() | float()):
                found.append((node, "constant"))
            case ast.If() | ast.IfExp():
                found.append((node, "negate"))
            case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute()]):
                found.append((node, "drop"))
            case ast.Return(value=ast.expr()):
                found.append((node, "return"))
    return found


def change(node: ast.AST, how: str) -> None:
    """Change a node in place."""
    swapped = {ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add}
    match node, how:
        case ast.Compare(), _:
            node.ops[0] = NEW[type(node.ops[0])]()
        case ((ast.BoolOp() | ast.BinOp() | ast.AugAssign()), _):
            node.op = swapped[type(node.op)]()
        case ast.Constant(), _:
            node.value = not node.value if isinstance(node.value, bool) else 2 if node.value == 1 else node.value + 1
        case ((ast.If() | ast.IfExp()), _):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.Return(), _:
            node.value = ast.Constant(None)
        case _:
            node.__class__, node._fields = ast.Pass, ()  # type: ignore[assignment]


def failing(tests: list[Test], *, first_alone: bool) -> list[Test]:
    """Run tests in a fork; return the functions that fail. One that stands still fails."""
    ours, theirs = os.pipe()
    if (child := os.fork()) == 0:
        os.setsid()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        import pytest

        class Reporter:
            def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
                if report.failed:
                    os.write(theirs, f"{report.nodeid.partition('[')[0]}\n".encode())

            def pytest_collectreport(self, report: pytest.CollectReport) -> None:
                if report.failed:
                    os.write(theirs, f"{tests[0].node}\n".encode())

        options = ["-q", "--timeout=40", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:cov", "--tb=no"]
        try:
            pytest.main([*options, *["-x"] * first_alone, *(test.node for test in tests)], plugins=[Reporter()])
        finally:
            os._exit(0)
    os.close(theirs)
    end, text = time.monotonic() + PATIENCE, b""
    while not (first_alone and text):
        if not select.select([ours], [], [], 1)[0]:
            if time.monotonic() > end:
                text += f"{tests[0].node}\n".encode()
                break
            continue
        if not (more := os.read(ours, 1 << 16)):
            break
        text += more
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ours)
    return sorted({Test(*line.split("::", 1)) for line in text.decode().splitlines()})


def mutate(data: Path, file: Path, rooms: tuple[str, ...], count: int, seed: int) -> None:
    """Choose what notices a mutation that the chosen functions do not; the plan is written after each."""
    marks, by_line = read_plan(file), defaultdict[tuple[str, int], set[Test]](set)
    for test, branches in reached(data).items():
        for path, *lines in branches:
            if path.startswith(rooms):
                for line in lines:
                    by_line[path, line].add(test)
    pool = [
        (path, i, node.lineno)
        for path in sorted({path for path, _ in by_line})
        for i, (node, _) in enumerate(sites(ast.parse((ROOT / path).read_text())))
        if isinstance(node, ast.stmt | ast.expr) and (path, node.lineno) in by_line
    ]
    random.Random(seed).shuffle(pool)
    for name in LIBRARIES:
        __import__(name)
    done = chosen = 0
    for path, i, line in pool:
        there = {test for test in by_line[path, line] if test in marks}
        kept, rest = (sorted(t for t in there if (marks[t] == "-") == redundant) for redundant in (False, True))
        if not rest or done == count:
            continue
        done += 1
        text = (ROOT / path).read_text()
        tree = ast.parse(text)
        before = (ast.get_source_segment(text, (site := sites(tree)[i])[0]) or "").split("\n")[0]
        change(*site)
        try:
            (ROOT / path).write_text(ast.unparse(ast.fix_missing_locations(tree)))
            noticed = kept and failing(kept, first_alone=True)
            alone = [] if noticed else failing(rest, first_alone=False)
        finally:
            (ROOT / path).write_text(text)
        if alone:
            best = min(alone, key=lambda t: len(t.node))
            marks[best], chosen = "+", chosen + 1
            write_plan(file, marks)
        result = "noticed" if noticed else f"{alone[0].node} is chosen" if alone else "nothing notices it"
        print(f"{done}/{count} {path}:{line} {site[1]} {before[:60]!r}: {result}", flush=True)
    print(f"{done} mutations, {chosen} functions chosen")


def delete(file: Path) -> None:
    """Remove the functions with a `-`, and the comments above them."""
    by_file = defaultdict[str, list[str]](list)
    for test, mark in read_plan(file).items():
        if mark == "-":
            by_file[test.file].append(test.name)
    for path, names in by_file.items():
        places, lines = functions(path), (ROOT / path).read_text().split("\n")
        gone = set[int]()
        for first, last, _ in (places[name] for name in names if name in places):
            while first > 1 and lines[first - 2].lstrip().startswith("#"):
                first -= 1
            gone |= set(range(first, last + 1))
        (ROOT / path).write_text("\n".join(text for number, text in enumerate(lines, 1) if number not in gone))
        print(f"{path}: {len(names)} functions")


def main() -> int:
    """Do one of the four."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("measure", "plan", "mutate", "delete"))
    p.add_argument("tests", nargs="*", help="measure: folders and files")
    p.add_argument("--data", type=Path, help="coverage of `measure`")
    p.add_argument("--plan", type=Path, help="marks of the functions")
    p.add_argument("--rooms", default="serl_chunk/", help="mutate: beginnings of paths, comma-separated")
    p.add_argument("--count", type=int, default=200, help="mutate: how many places")
    p.add_argument("--seed", type=int, default=1, help="mutate: of the places")
    args = p.parse_args()
    for name in {"measure": ("data",), "delete": ("plan",)}.get(args.what, ("data", "plan")):
        if getattr(args, name) is None:
            p.error(f"{args.what} needs --{name}")
    match args.what:
        case "measure":
            return measure(args.tests, args.data)
        case "plan":
            plan(args.data, args.plan)
        case "mutate":
            mutate(args.data, args.plan, tuple(args.rooms.split(",")), args.count, args.seed)
        case "delete":
            delete(args.plan)
    return 0


if __name__ == "__main__":
    sys.exit(main())
