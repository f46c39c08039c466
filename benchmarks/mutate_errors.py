"""Count the error messages that a test looks at: some are replaced in a copy of the checkout, whose tests then run.

A mutant is one `raise` of an error of this package, or of a ValueError or TypeError, whose first argument is a text: in
the copy that text is "MUTANT <k> message". All mutants are there at once. A mutant is caught if the report of a
failing test contains its text. Messages of `require` are not among them.

    python benchmarks/mutate_errors.py --count 30 --seed 0 --out mutation.json
    python benchmarks/mutate_errors.py --raises mutation.json --root ../other_checkout
    python benchmarks/mutate_errors.py --count 30 tests/data tests/transport

`--raises` takes the choice of an earlier run: each message is found again by its text, in whatever file it is now.
The checkout needs its .venv (`make .venv/installed`). The default tests take half an hour on two shared cores.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = ("serl_chunk", "packages/serl-chunk-robot/serl_chunk_robot")
BASE = "SerlChunkError"  # of all errors of the package
BUILTIN = ("ValueError", "TypeError")
LEFT_OUT = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "runs", "demos", "wandb")
FLAGS = "--xla_cpu_use_fusion_emitters=false"  # as `make test` compiles


class Raise(NamedTuple):
    """One `raise` with a message."""

    file: Path  # relative to the checkout
    function: str  # qualified name, "" for a module's own statements
    index: int  # among those of the function
    error: str  # the class
    text: str  # the message's source, in one line
    message: ast.expr

    @property
    def template(self) -> str:
        """Return the message without what is put into it, which may have another name in another tree."""
        if isinstance(self.message, ast.JoinedStr):
            return "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in self.message.values)
        return ast.literal_eval(self.message)

    def to_json(self) -> dict[str, Any]:
        """Return what `--raises` needs to find it again."""
        return {
            "file": self.file.stem,
            "function": self.function,
            "index": self.index,
            "error": self.error,
            "text": self.text,
            "template": self.template,
        }


def error_classes(trees: Sequence[ast.Module]) -> set[str]:
    """Return the names of the classes that derive from the package's base of errors."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found, before = {BASE}, set[str]()
    while found != before:
        before = set(found)
        found |= {name for name, parents in bases.items() if parents & found}
    return found


def raises(root: Path) -> list[Raise]:
    """Return every `raise` with a message of a checkout's packages, by file and line."""
    files = [file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
    trees = {file: ast.parse(file.read_text()) for file in files}
    wanted = error_classes(list(trees.values())) | set(BUILTIN)
    return [found for file, tree in trees.items() for found in _raises_of(tree, file.relative_to(root), wanted)]


def _raises_of(tree: ast.Module, file: Path, wanted: set[str]) -> Iterator[Raise]:
    counts: dict[str, int] = {}

    def visit(node: ast.AST, function: str) -> Iterator[Raise]:
        for child in ast.iter_child_nodes(node):
            inner = function
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{function}.{child.name}".lstrip(".")
            elif isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call) and child.exc.args:
                error, message = ast.unparse(child.exc.func).rpartition(".")[2], child.exc.args[0]
                literal = isinstance(message, ast.Constant) and isinstance(message.value, str)
                if error in wanted and (literal or isinstance(message, ast.JoinedStr)):
                    index = counts[function] = counts.get(function, -1) + 1
                    yield Raise(file, function, index, error, ast.unparse(message), message)
            yield from visit(child, inner)

    yield from visit(tree, "")


def located(saved: Sequence[dict[str, Any]], there: Sequence[Raise]) -> list[Raise | None]:
    """Return the saved choice as it is in a checkout, found by text; None for a message found nowhere or twice."""
    out: list[Raise | None] = []
    for wanted in saved:
        found = [r for r in there if r.text == wanted["text"]]
        found = found or [r for r in there if r.template == wanted["template"]]
        # Of equal messages the one in the same place, as far as its name is the same.
        for key in ("function", "file", "index"):
            same = [r for r in found if r.to_json()[key] == wanted[key]]
            found = same or found
        out.append(found[0] if len(found) == 1 else None)
    return out


def mutated(text: str, mutants: dict[int, Raise]) -> str:
    """Return a module's text with the messages of its mutants replaced."""
    data = text.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for k, mutant in sorted(
        mutants.items(), key=lambda item: -starts[item[1].message.lineno - 1] - item[1].message.col_offset
    ):
        m = mutant.message
        assert m.end_lineno is not None
        assert m.end_col_offset is not None
        begin, end = starts[m.lineno - 1] + m.col_offset, starts[m.end_lineno - 1] + m.end_col_offset
        data = data[:begin] + f'"MUTANT {k} message"'.encode() + data[end:]
    out = data.decode()
    ast.parse(out)
    return out


def copy_of(root: Path, folder: Path, mutants: dict[int, Raise]) -> Path:
    """Copy the checkout with the mutants in it; return the Python that imports the copy."""
    below = shutil.ignore_patterns("__pycache__")
    top = shutil.ignore_patterns(*LEFT_OUT)  # `runs` is also the name of a room: of the root's folders alone

    def left_out(here: str, names: list[str]) -> set[str]:
        return set(top(here, names) if Path(here) == root else below(here, names))

    shutil.copytree(root, folder, ignore=left_out, symlinks=True)
    for file in {mutant.file for mutant in mutants.values()}:
        own = {k: mutant for k, mutant in mutants.items() if mutant.file == file}
        (folder / file).write_text(mutated((folder / file).read_text(), own))
    python = root / ".venv" / "bin" / "python"
    venv = folder / ".venv"
    subprocess.run([str(python), "-m", "venv", "--without-pip", str(venv)], check=True)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    installed, here = (
        Path(subprocess.run([str(p), "-c", where], capture_output=True, text=True, check=True).stdout.strip())
        for p in (python, venv / "bin" / "python")
    )
    # The checkout's packages, and in the place of its own the copy: what comes first by name is what counts.
    for file in installed.glob("__editable__*"):
        if file.is_file():
            (here / file.name).write_text(file.read_text().replace(f"{root}/", f"{folder}/"))
    (here / "checkout.pth").write_text(f"import site; site.addsitedir({str(installed)!r})\n")
    for script in (root / ".venv" / "bin").glob("serl-chunk"):
        (venv / "bin" / script.name).write_text(script.read_text().replace(f"{root}/.venv", str(venv)))
        (venv / "bin" / script.name).chmod(0o755)
    check = (
        "import importlib.util, serl_chunk, serl_chunk_robot, serl_chunk.experiments as e; "
        "print(serl_chunk.__file__, serl_chunk_robot.__file__, *e.__path__, importlib.util.find_spec('pytest').origin)"
    )
    at = subprocess.run([venv / "bin" / "python", "-c", check], cwd="/", capture_output=True, text=True, check=True)
    *ours, _ = at.stdout.split()
    if not all(Path(path).is_relative_to(folder) for path in ours):
        raise SystemExit(f"the copy imports {' and '.join(ours)}, which are not all in {folder}")
    return venv / "bin" / "python"


def run_tests(folder: Path, python: Path, paths: Sequence[str], processes: int) -> dict[str, str]:
    """Run the copy's tests; return the reports of those that failed, by the test's name."""
    report = folder / "report.xml"
    command = [str(python), "-m", "pytest", "--numprocesses", str(processes), "--dist", "loadfile", "--tb", "short"]
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["XLA_FLAGS"] = f"{FLAGS} {environment.get('XLA_FLAGS', '')}".strip()
    subprocess.run([*command, f"--junitxml={report}", *paths], cwd=folder, env=environment, check=False)
    if not report.is_file():
        raise SystemExit(f"pytest wrote no report in {folder}")
    tests = list(ElementTree.parse(report).getroot().iter("testcase"))
    if not tests:
        raise SystemExit(f"pytest ran no test: {' '.join(paths)}")
    print(f"{len(tests)} tests ran")
    return {
        f"{test.get('classname')}::{test.get('name')}": "\n".join(
            f"{part.get('message', '')}\n{part.text or ''}" for part in test if part.tag in ("failure", "error")
        )
        for test in tests
        if test.find("failure") is not None or test.find("error") is not None
    }


def main() -> None:
    """Print a line for each mutant, and how many were caught."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("tests", nargs="*", help="paths of tests to run (default: all that are not slow)")
    p.add_argument("--count", type=int, default=30, help="mutants, drawn by --seed")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--raises", type=Path, metavar="FILE", help="mutate the choice of an earlier --out instead")
    p.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="checkout (default: this one)")
    p.add_argument("--processes", type=int, default=2, help="of the tests")
    p.add_argument("--list", action="store_true", help="print the choice and run nothing")
    p.add_argument("--out", "--json", dest="out", type=Path, help="write the choice and the figures here (JSON)")
    args = p.parse_args()
    root = args.root.resolve()
    there = raises(root)
    if args.raises:
        saved = json.loads(args.raises.read_text())["raises"]
        chosen = located(saved, there)
    else:
        if not 1 <= args.count <= len(there):
            p.error(f"--count {args.count}: there are {len(there)} messages")
        drawn = random.Random(args.seed).sample(range(len(there)), args.count)
        chosen = [there[i] for i in sorted(drawn)]
        saved = [mutant.to_json() for mutant in chosen]
    mutants = {k: mutant for k, mutant in enumerate(chosen) if mutant is not None}
    for k, entry in enumerate(saved):
        lost = "" if k in mutants else "   not found, or not once"
        print(
            f"{k:3} {entry['file']}:{entry['function']}:{entry['index']} {entry['error']}{lost}\n      {entry['text']}"
        )
    figures: dict[str, Any] = {"seed": None if args.raises else args.seed, "messages": len(there), "raises": saved}
    print(f"{len(mutants)} of {len(there)} messages; {len(saved) - len(mutants)} of the choice not found", flush=True)
    if not args.list:
        with tempfile.TemporaryDirectory(prefix="mutants_") as name:
            folder = Path(name).resolve() / "checkout"
            failed = run_tests(folder, copy_of(root, folder, mutants), args.tests, args.processes)
        by = {k: [test for test, text in failed.items() if f"MUTANT {k} message" in text] for k in mutants}
        for k, tests in by.items():
            print(f"{k:3} {'caught by ' + tests[0] if tests else 'MISSED'}")
        caught = sum(map(bool, by.values()))
        unknown = sorted(set(failed) - {test for tests in by.values() for test in tests})
        print(f"{caught} of {len(mutants)} mutants caught")
        print(f"{len(failed)} tests failed, {len(unknown)} without naming a mutant: {', '.join(unknown) or 'none'}")
        figures |= {"mutants": len(mutants), "caught": caught, "failed_without_mutant": unknown}
        figures["raises"] = [entry | {"caught_by": by.get(k)} for k, entry in enumerate(saved)]
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
