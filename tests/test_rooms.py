"""Rules of the whole tree: imports, sizes of files, what works without JAX, and that every setting is read."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import serl_chunk
import serl_chunk_robot
from serl_chunk.cli.commands import COMMANDS

PACKAGE = Path(serl_chunk.__file__).resolve().parent
ROBOT = Path(serl_chunk_robot.__file__).resolve().parent
ROOT = PACKAGE.parent

# room -> the rooms it may import (docs/architecture.md, section 2); each may import itself
RULE: dict[str, set[str]] = {
    "io": set(),
    "version": set(),
    "types": set(),
    "viz": {"types"},
    "extras": {"types"},
    "config": {"types"},
    "models": {"types", "config"},
    "agents": {"types", "config", "models"},
    "transport": {"types", "config"},
    "data": {"types", "config", "extras", "viz"},
    "robots": {"types", "config", "extras"},
    "devices": {"types", "config", "robots"},
    "classifier": {"types", "config", "models", "data", "viz"},
    "outcomes": {"types", "config", "classifier", "robots"},
    "attention": {"types"},
    "console": {"types", "config"},
    "replay": {"types", "config", "data"},
    "serving": {"types"},
    "runs": {"types", "config", "models", "transport", "data", "viz"},
    "viewer": {"types", "config", "data", "runs", "viz"},
    "live": {"types", "console", "viewer", "viz"},
    "actor": {"types", "config", "agents", "transport", "data", "robots", "devices", "outcomes", "console", "serving"},
    "operator": {"types", "config", "attention", "robots", "devices", "outcomes", "console", "actor"},
    "recording": {
        "types", "config", "transport", "data", "robots", "devices", "classifier", "outcomes", "console", "actor",
        "operator",
    },
    "learner": {"types", "config", "agents", "data", "replay", "runs", "transport"},
    "evaluation": {
        "types", "config", "agents", "data", "robots", "outcomes", "console", "viz", "runs", "actor", "operator",
        "learner",
    },
    "signals": set(),
    "logs": {"signals", "runs"},
    "fleet": {"types", "signals", "logs"},
}  # fmt: skip
for _room, _allowed in RULE.items():
    if _room not in ("io", "version"):
        _allowed |= {"io", "version"}
RULE["cli"] = {*RULE}
RULE["main"] = {*RULE}
RULE["__main__"] = {"main"}
RULE["__init__"] = {*RULE} - {"main", "__main__", "cli"}
ROBOT_RULE: dict[str, set[str]] = {  # the same of serl_chunk_robot, which imports nothing of serl_chunk
    "__init__": {"exports"},
    "exports": set(),
    "errors": set(),
    "output": set(),
    "wire": {"errors"},
    "geometry": set(),
    "safety": {"geometry"},
    "drivers": {"geometry"},
    "control": {"errors", "geometry", "safety", "drivers"},
    "devices": {"errors", "safety", "drivers", "control"},
    "robot_file": {"errors", "wire", "geometry", "safety", "drivers", "control", "devices"},
    "client": {"errors", "wire"},
    "server": {"errors", "output", "wire", "safety", "drivers", "control", "devices", "robot_file", "client"},
    "commands": {"errors", "wire", "safety", "drivers", "control", "robot_file", "client"},
    "main": {"__version__", "errors", "client", "robot_file", "server", "commands"},
    "__main__": {"main"},
}
BY_NAME = "drivers"  # room of serl_chunk_robot whose simulated robots may load one of serl_chunk, by name alone
WITHOUT_JAX = {
    "io", "version", "types", "extras", "config", "transport", "data", "robots", "devices", "outcomes", "attention",
    "viewer", "console", "live", "serving", "signals",
}  # fmt: skip
ACCELERATED = {"jax", "jaxlib", "flax", "optax", "orbax"}


MODULES, ROBOT_MODULES = sorted(PACKAGE.rglob("*.py")), sorted(ROBOT.rglob("*.py"))
PRODUCT = [*MODULES, *ROBOT_MODULES]


def room_of(path: Path) -> str:
    package = PACKAGE if path.is_relative_to(PACKAGE) else ROBOT
    return path.relative_to(package).parts[0].removesuffix(".py")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of everything a module imports, wherever in it, but not what only a type checker sees."""

    def visit(node: ast.AST) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            base = node.module or ""
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    return list(visit(parsed(path)))


def importing(paths: list[Path], wrong: Callable[[Path, str], bool]) -> list[str]:
    return [
        f"{p.relative_to(ROOT)}:{line} imports {name}" for p in paths for line, name in imports(p) if wrong(p, name)
    ]


@pytest.mark.parametrize(("package", "modules", "rule"), [(PACKAGE, MODULES, RULE), (ROBOT, ROBOT_MODULES, ROBOT_RULE)])
def test_imports_go_one_way_and_the_robot_package_imports_its_own_rooms_alone(package, modules, rule):
    def wrong(path: Path, name: str) -> bool:
        whole, _, part = name.partition(".")
        own = {*rule[room_of(path)], room_of(path), *([""] if package == PACKAGE else [])}
        return whole in ("serl_chunk", package.name) and (whole != package.name or part.partition(".")[0] not in own)

    assert {room_of(p) for p in modules} == set(rule)
    assert importing(modules, wrong) == []


def test_the_robot_package_names_no_module_of_serl_chunk_but_simulated_robots():
    nodes = ((p, n) for p in ROBOT_MODULES if room_of(p) != BY_NAME for n in ast.walk(parsed(p)))
    named = [(p.name, n.value) for p, n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    assert [each for each in named if each[1].startswith("serl_chunk.")] == []


def test_rooms_without_jax_never_name_it_and_simulators_are_imported_by_extras_alone():
    """The first import of MuJoCo decides how it renders, and each simulator has one install hint."""
    without = [p for p in PRODUCT if p.is_relative_to(ROBOT) or room_of(p) in WITHOUT_JAX]
    assert importing(without, lambda _, name: name.split(".")[0] in ACCELERATED) == []
    simulators = {"mujoco", "dm_control", "ogbench", "robosuite", "gym_aloha"}
    assert importing(PRODUCT, lambda _, name: name.split(".")[0] in simulators) == []


LONGEST = 600  # lines of a product file
SHORTEST = 60  # lines of one that a single module imports; a shorter one makes its reader open two files for one idea
SHORT_WITH_REASON: dict[str, str] = {  # path -> why it stands alone
    "serl_chunk/robots/aloha.py": "loaded by name, as the specification of each other robot is"
}


def dotted(path: Path) -> str:
    root = ROOT if path.is_relative_to(PACKAGE) else ROBOT.parent
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def import_graph() -> dict[str, set[str]]:
    """Module -> the modules of both packages that it imports, wherever in it."""
    names = {dotted(p) for p in PRODUCT}
    graph: dict[str, set[str]] = {}
    for path in PRODUCT:
        found = set()
        for _, name in imports(path):
            found |= {name, name.rpartition(".")[0]} & names
        graph[dotted(path)] = found - {dotted(path)}
    for name, imported in graph.items():  # `from room import module` is an import of the module, not of the room
        graph[name] = {m for m in imported if not any(other.startswith(f"{m}.") for other in imported)}
    return graph


def test_no_file_is_too_long_and_no_short_one_serves_one_module_without_a_reason():
    sizes = {path: len(path.read_text().splitlines()) for path in PRODUCT}
    assert {str(path): n for path, n in sizes.items() if n > LONGEST} == {}
    importers = collections.Counter(module for imported in import_graph().values() for module in imported)
    commands = {f"serl_chunk.cli.{command.module}" for command in COMMANDS.values()}  # loaded by name
    short = {
        str(path.relative_to(ROOT))
        for path, n in sizes.items()
        if n < SHORTEST
        and path.name not in ("__init__.py", "__main__.py")
        and dotted(path) not in commands
        and importers[dotted(path)] < 2
    }
    assert short == set(SHORT_WITH_REASON)


MOST_ATTRIBUTES = 20  # of an instance: what changes together is a value of its own


def test_no_class_has_too_many_attributes():
    found = {}
    for path, tree in ((p, n) for p in PRODUCT for n in ast.walk(parsed(p)) if isinstance(n, ast.ClassDef)):
        stores = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
        own = {n.attr for n in stores if isinstance(n.value, ast.Name) and n.value.id == "self"}
        found[f"{path.relative_to(ROOT)} {tree.name}"] = len(own)
    assert {name: n for name, n in found.items() if n > MOST_ATTRIBUTES} == {}


def test_no_imports_go_in_a_circle():
    """Imports inside functions count; those for type checkers do not."""
    graph = import_graph()
    assert len(graph) > 100
    while free := {name for name, imported in graph.items() if not imported & graph.keys()}:
        graph = {name: imported for name, imported in graph.items() if name not in free}
    # What is left is on a circle or imports one: peel those off that nothing left imports.
    while top := graph.keys() - set().union(*graph.values()):
        graph = {name: imported for name, imported in graph.items() if name not in top}
    assert sorted(graph) == []


def test_importing_the_package_loads_no_arrays():
    code = (
        "import sys, serl_chunk; print(sorted({'numpy', 'jax'} & set(sys.modules))); "
        "print([n for n in serl_chunk.__all__ if getattr(serl_chunk, n, None) is None])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines() == ["[]", "[]"], done.stderr


def test_exports_are_declared_for_both_readers():
    """A type checker reads a name of the stub as exported only where it is repeated (`A as A`)."""
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    aliases = [alias for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert all(alias.asname == alias.name for alias in aliases)
    assert {"make_agent", "load_experiment", "LearnerLink", "evaluate"} <= set(serl_chunk.__all__)
    assert serl_chunk_robot.__all__ == [
        "Camera", "Driver", "DriverSpec", "InputDevice", "Reading", "RobotClient", "open_robot",
    ]  # fmt: skip


BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Blocker())
import importlib
for module in {modules!r}:
    importlib.import_module(module)
from serl_chunk.agents.registry import IMPLEMENTATIONS, make_agent
from serl_chunk.config.loader import load_experiment
from serl_chunk.robots.registry import make_env, robot_spec
config = load_experiment("fake_aloha")
env = make_env(config.robot)
env.reset(seed=0)
env.step(env.action_space.sample())
assert robot_spec(config.robot) == env.robot_spec
try:
    make_agent(config, env.robot_spec)
except ImportError as error:
    assert "blocked" in str(error)
else:
    raise AssertionError("JAX was not blocked")
print("works")
"""


def test_a_robot_pc_needs_no_jax():
    """Configurations, transport, data and robots (but for the MuJoCo ones) in a process that cannot import JAX."""
    names = [dotted(p) for p in MODULES if room_of(p) in WITHOUT_JAX and p.parent.name != "aloha_sim"]
    code = BLOCKED.format(names=sorted(ACCELERATED), modules=[*names, "serl_chunk.agents.registry", "serl_chunk.main"])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "works", done.stderr


def reads(tree: ast.AST) -> set[str]:
    """Names that are read as attributes, directly or by `getattr` with a literal name."""
    out = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id == "getattr" and isinstance(call.args[1], ast.Constant):
            out.add(call.args[1].value)
    return out


def test_every_setting_is_read():
    """Outside config, or by a method of its class that is read there; validating a value is not using it."""
    used = set().union(*(reads(parsed(p)) for p in MODULES if room_of(p) != "config"))
    for path in (PACKAGE / "config").rglob("*.py"):
        for function in (n for n in ast.walk(parsed(path)) if isinstance(n, ast.FunctionDef)):
            if not function.name.startswith("_") and function.name in used:
                used |= reads(function)
    modules = [importlib.import_module(dotted(path)) for path in (PACKAGE / "config").rglob("*.py")]
    classes = [c for m in modules for c in vars(m).values() if getattr(c, "__module__", "") == m.__name__]
    classes = [c for c in classes if dataclasses.is_dataclass(c)]
    assert len(classes) > 10
    unread = [f"{c.__name__}.{f.name}" for c in classes for f in dataclasses.fields(c) if f.name not in used]
    assert not unread


def test_every_module_and_public_name_of_it_is_documented():
    missing = []
    for path in PRODUCT:
        tree = parsed(path)
        named = [n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and not n.name.startswith("_")]
        whole = [tree] if tree.body else []
        missing += [f"{path}: {getattr(n, 'name', '')}" for n in (*whole, *named) if ast.get_docstring(n) is None]
    assert missing == []


UNSAFE = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "msgpack_numpy"}
UNPICKLERS = {"recv_pyobj", "read_pickle"}  # of pyzmq and pandas
LOADING = {"import_module", "__import__", "load", "Listener", "Client"}  # calls that are read in full


def unsafe_reads(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of every way to a pickle that is not an import statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name in {*UNPICKLERS, "pickle", "cPickle", "_pickle"}:
                yield node.lineno, name
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield node.value.lineno, "allow_pickle"
        if not isinstance(node, ast.Call) or getattr(node.func, "attr", getattr(node.func, "id", "")) not in LOADING:
            continue
        called, first = ast.unparse(node.func), ast.unparse(node.args[0]).strip("'\"") if node.args else ""
        if called.endswith(("import_module", "__import__")) and first.split(".")[0] in UNSAFE:
            yield node.lineno, f"{called}({first})"
        if called in ("np.load", "numpy.load") and (len(node.args) > 2 or any(k.arg is None for k in node.keywords)):
            yield node.lineno, f"{called} with arguments that may allow pickles"  # the third is allow_pickle
        if called in ("multiprocessing.connection.Listener", "multiprocessing.connection.Client", "Listener"):
            yield node.lineno, f"{called} unpickles what it receives"


def test_nothing_unpickles():
    """Loading a pickle runs what its writer likes. Names may speak of it: `.pkl` demonstrations are refused.

    Also experiments and benchmarks: a learner reads what strangers send, and files that others made.
    """
    beside = [*(ROOT / "experiments").glob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    assert len(beside) > 10
    paths = [*PRODUCT, *beside]
    assert importing(paths, lambda _, name: name.split(".")[0] in UNSAFE) == []
    assert [f"{p}:{line} {what}" for p in paths for line, what in unsafe_reads(parsed(p))] == []
    for text in (
        "import numpy as np; np.load(f, None, True)", "socket.recv_pyobj()", "importlib.import_module('pickle')",
        "np.load(f, **options)", "pd.read_pickle(f)", "sys.modules['x'].pickle.loads(b)", "np.load(f, allow_pickle=x)",
        "__import__('dill')", "multiprocessing.connection.Client(address)",
    ):  # fmt: skip
        assert list(unsafe_reads(ast.parse(text))), text
    assert not list(unsafe_reads(ast.parse("np.load(f, mmap_mode='r', allow_pickle=False)")))


def test_nothing_asks_at_a_terminal_or_runs_text():
    names = {"input", "breakpoint", "eval", "exec"}
    calls = ((path, n) for path in PRODUCT for n in ast.walk(parsed(path)) if isinstance(n, ast.Call))
    assert [f"{path}:{n.lineno}" for path, n in calls if isinstance(n.func, ast.Name) and n.func.id in names] == []
