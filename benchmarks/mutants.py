"""Change the product in one place at a time, and count the changes that its rooms' tests notice.

Mutations are cosmic-ray's, drawn over all rooms in proportion to their lines. Each is kept as the lines before and
after it and the definition around them, by which it is found again in a tree whose files have moved. It runs against
the tests of its room that reach these lines, which a first run of the room under coverage tells. A mutant is caught
when one of them fails.

    pip install cosmic-ray pytest-cov
    python benchmarks/mutants.py draw --seed 16 --count 300 --list mutants.json
    python benchmarks/mutants.py run --list mutants.json --json before.json --room serl_chunk/data
    python benchmarks/mutants.py compare before.json after.json

`run` works in a copy of the checkout, whose .venv it takes. What is in --json is not run again.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = {"serl_chunk": "serl_chunk", "serl_chunk_robot": "packages/serl-chunk-robot/serl_chunk_robot"}
LEFT_OUT = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "wandb")
FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"  # as `make test` compiles, nearly


class Mutant(NamedTuple):
    """One change."""

    room: str  # serl_chunk/actor, serl_chunk_robot/wire, ...
    file: str  # name without folders
    definition: str  # qualified name of the innermost one around it, "" for a module's own statements
    before: list[str]  # lines, stripped
    after: list[str]


class Found(NamedTuple):
    """A mutant in a tree."""

    path: Path
    first: int  # line, from 0
    room: str


def room_of(name: str, base: Path, path: Path) -> str:
    """The room of a file: the folder in its package, or the package itself."""
    inner = path.relative_to(base).parts
    return f"{name}/{inner[0]}" if len(inner) > 1 else name


def product(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield room and path of each file of the product."""
    for name, folder in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            yield room_of(name, root / folder, path), path


def tests_of(root: Path, room: str) -> list[str]:
    """Folders and files of a room's tests."""
    name, _, inner = room.partition("/")
    base = root / "tests" / ("serl_chunk_robot" if name == "serl_chunk_robot" else "")
    places = [base / inner] if inner else sorted(base.glob("test_*.py"))
    return [str(p.relative_to(root)) for p in places if p.exists()]


class _Definitions(ast.NodeVisitor):
    """Ranges of lines of each definition."""

    def __init__(self, tree: ast.AST) -> None:
        self.ranges: list[tuple[int, int, str]] = []
        self._names: list[str] = []
        self.visit(tree)

    def _enter(self, node: Any) -> None:
        self._names.append(node.name)
        self.ranges.append((node.lineno - 1, node.end_lineno, ".".join(self._names)))
        self.generic_visit(node)
        self._names.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _enter

    def at(self, line: int) -> str:
        inside = [r for r in self.ranges if r[0] <= line < r[1]]
        return min(inside, key=lambda r: r[1] - r[0])[2] if inside else ""


class _Executed(ast.NodeTransformer):
    """Drop what is not executed: annotations."""

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        node.annotation = ast.Constant(None)
        return node


def executed(source: str) -> str:
    return ast.dump(_Executed().visit(ast.parse(source)))


@cache
def mutations(path: Path) -> list[tuple[Any, int]]:
    """Each operator of the library with the index of one of its places in a file."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    tree = get_ast(path.read_text())
    found = []
    for name in operator_names():
        if not name.startswith("core/Variable"):  # these need arguments
            operator = get_operator(name)()
            count = sum(len(list(operator.mutation_positions(node))) for node in ast_nodes(tree))
            found += [(operator, i) for i in range(count)]
    return found


def mutant(room: str, path: Path, operator: Any, index: int) -> Mutant | None:
    """One mutation as lines, or None if nothing that is executed differs."""
    from cosmic_ray.mutating import mutate_code

    source = path.read_text()
    try:
        mutated = mutate_code(source, operator, index)
        if mutated is None or executed(source) == executed(mutated):
            return None
    except (SyntaxError, AttributeError):  # the library's, of `except (module.Error, Other)`
        return None
    old, new = source.splitlines(), mutated.splitlines()
    blocks = [o for o in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if o[0] != "equal"]
    if len(blocks) != 1:
        return None
    _, i, j, k, m = blocks[0]
    if i == j or k == m:  # keep a line to find it by
        i, j, k, m = i, j + 1, k, m + 1
    name = _Definitions(ast.parse(source)).at(i)
    return Mutant(room, path.name, name, [x.strip() for x in old[i:j]], [x.strip() for x in new[k:m]])


def draw(root: Path, seed: int, count: int) -> list[Mutant]:
    """Draw mutants, none twice, over the rooms in proportion to their lines."""
    rng = random.Random(seed)
    files: dict[str, list[Path]] = defaultdict(list)
    for room, path in product(root):
        if tests_of(root, room):
            files[room].append(path)
    lines = {room: sum(len(p.read_text().splitlines()) for p in paths) for room, paths in files.items()}
    drawn: dict[tuple[str, ...], Mutant] = {}
    for room in rng.choices(list(lines), list(lines.values()), k=count):
        sizes = [len(p.read_text().splitlines()) for p in files[room]]
        while True:
            path = rng.choices(files[room], sizes)[0]
            if places := mutations(path):
                found = mutant(room, path, *rng.choice(places))
                if found and (key := (found.definition, *found.before, *found.after)) not in drawn:
                    drawn[key] = found
                    break
    return sorted(drawn.values())


def find(root: Path, m: Mutant) -> Found | None:
    """Where a mutant's lines are now: in a file of its name first, in a definition of its name."""
    size, places = len(m.before), []
    for room, path in product(root):
        old = [line.strip() for line in path.read_text().splitlines()]
        starts = [i for i in range(len(old) - size + 1) if old[i : i + size] == m.before]
        if starts:
            definitions = _Definitions(ast.parse(path.read_text()))
            tail = m.definition.rpartition(".")[2]
            for i in starts:
                at = definitions.at(i)
                if at.rpartition(".")[2] == tail:
                    places.append((at != m.definition, path.name != m.file, room != m.room, str(path), i, room))
    if not places:
        return None
    *_, path_name, first, room = min(places)
    return Found(Path(path_name), first, room)


def change(found: Found, m: Mutant) -> None:
    """Write the mutant into its file, with the indentation that is there."""
    lines = found.path.read_text().splitlines()
    old = lines[found.first : found.first + len(m.before)]
    indent = [line[: len(line) - len(line.lstrip())] for line in old]
    new = [indent[min(i, len(indent) - 1)] + text for i, text in enumerate(m.after)]
    lines[found.first : found.first + len(m.before)] = new
    found.path.write_text("\n".join(lines) + "\n")


class Checkout:
    """A copy of the checkout to change and to test."""

    def __init__(self, root: Path, folder: Path, coverage: Path) -> None:
        self.root, self.coverage = folder / "tree", coverage
        every = shutil.ignore_patterns(*LEFT_OUT)
        own = shutil.ignore_patterns("runs", "demos")  # of packages and tests they are rooms
        shutil.copytree(
            root, self.root, ignore=lambda at, names: every(at, names) | (own(at, names) if Path(at) == root else set())
        )
        self.environ = os.environ | {
            "PYTHONPATH": f"{self.root}:{self.root / 'packages/serl-chunk-robot'}",
            "XLA_FLAGS": FLAGS,
            "PYTHONDONTWRITEBYTECODE": "1",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "jax"),
        }

    def pytest(self, *args: str, timeout: float = 3600) -> int:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args]
        try:
            return subprocess.run(
                command, cwd=self.root, env=self.environ, timeout=timeout, capture_output=True, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return 1  # the mutant stands still where the product does not

    def reached(self, room: str) -> Path:
        """Coverage of a room by each of its tests, measured once."""
        file = self.coverage / f"{room.replace('/', '.')}.sqlite"
        if not file.exists():
            options = [f"--cov={name}" for name in PACKAGES]
            self.environ["COVERAGE_FILE"] = str(self.coverage / "under_way")
            self.pytest(*tests_of(self.root, room), *options, "--cov-context=test", "--cov-report=", timeout=7200)
            (self.coverage / "under_way").rename(file)
        return file

    def tests(self, found: Found, lines: int) -> list[str]:
        """The tests of its room that reach a mutant's lines; the room's all where that is when it is imported."""
        from coverage.numbits import numbits_to_nums

        wanted = set(range(found.first + 1, found.first + lines + 1))
        ends = str(found.path.relative_to(self.root))
        with sqlite3.connect(self.reached(found.room)) as db:
            rows = db.execute(
                "select context.context, line_bits.numbits from line_bits join file on file.id = file_id "
                "join context on context.id = context_id where file.path like ?",
                [f"%/{ends}"],
            )
            contexts = {context for context, bits in rows if wanted & set(numbits_to_nums(bits))}
        if "" in contexts:
            return tests_of(self.root, found.room)
        return sorted({context.rpartition("|")[0] for context in contexts})

    def outcome(self, m: Mutant) -> str:
        """One of caught, missed, unreached (by no test of its room), gone (from this tree)."""
        found = find(self.root, m)
        if found is None:
            return "gone"
        tests = self.tests(found, len(m.before))
        if not tests:
            return "unreached"
        source = found.path.read_text()
        change(found, m)
        try:
            return "caught" if self.pytest("-x", *tests) not in (0, 5) else "missed"
        finally:
            found.path.write_text(source)


def run(root: Path, mutants: list[Mutant], results: Path, coverage: Path) -> None:
    """Run the mutants that have no result yet, and note each."""
    done = json.loads(results.read_text()) if results.exists() else []
    seen = {json.dumps(row["mutant"]) for row in done}
    coverage.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        checkout = Checkout(root, Path(folder), coverage.resolve())
        for m in mutants:
            if json.dumps(m) not in seen:
                done.append({"mutant": m, "outcome": checkout.outcome(m)})
                results.write_text("[\n" + ",\n".join(map(json.dumps, done)) + "\n]\n")
                print(f"{len(done)} of {len(mutants)}: {done[-1]['outcome']}, {m.room} {m.definition}", flush=True)


def compare(before: Path, after: Path) -> None:
    """Print how many were caught in both trees, and each that only the first one's tests caught."""
    rows = [{json.dumps(r["mutant"]): r["outcome"] for r in json.loads(f.read_text())} for f in (before, after)]
    print({f.name: dict(Counter(r.values())) for f, r in zip((before, after), rows, strict=True)})
    for key, outcome in rows[0].items():
        if outcome == "caught" and rows[1].get(key) not in ("caught", None):
            print(rows[1][key], key)


def main() -> None:
    """Draw, run or compare."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("draw", "run", "compare"))
    p.add_argument("files", nargs="*", type=Path, help="of compare: results before and after")
    p.add_argument("--seed", type=int, default=16)
    p.add_argument("--count", type=int, default=300)
    p.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout")
    p.add_argument("--room", default="", help="of run: rooms whose names begin so")
    p.add_argument("--list", type=Path, default=Path(__file__).parent / "mutants.json", help="the mutants")
    p.add_argument("--json", type=Path, default=Path("mutants_run.json"), help="results of run")
    p.add_argument(
        "--coverage", type=Path, default=Path("mutants_coverage"), help="kept coverage of rooms, of this tree"
    )
    args = p.parse_args()
    if args.what == "draw":
        drawn = draw(args.root, args.seed, args.count)
        args.list.write_text("[\n" + ",\n".join(map(json.dumps, drawn)) + "\n]\n")
        print(dict(Counter(m.room for m in drawn)))
    elif args.what == "run":
        mutants = [Mutant(*m) for m in json.loads(args.list.read_text())]
        run(args.root.resolve(), [m for m in mutants if m.room.startswith(args.room)], args.json, args.coverage)
    else:
        compare(*args.files)


if __name__ == "__main__":
    main()
