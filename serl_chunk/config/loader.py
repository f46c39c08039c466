"""From `--exp_name` to an experiment: a packaged name, a name in ./experiments, or the path of a .py file."""

from __future__ import annotations

import difflib
import functools
import importlib.machinery
import importlib.util
import inspect
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType

import serl_chunk_robot
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.hil_serl import TASKS
from serl_chunk.types import ConfigError, SerlChunkError


def packaged_folder() -> Path:
    """Return the folder of the experiments that come with the package."""
    spec = importlib.util.find_spec("serl_chunk.experiments")
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(__file__).resolve().parents[2] / "experiments"  # a source tree that was not installed


def known_experiments() -> dict[str, Path]:
    """Return `name -> file` of the packaged experiments and of those in ./experiments, which win."""
    found = {}
    for folder in (packaged_folder(), Path.cwd() / "experiments"):
        if folder.is_dir():
            found.update({p.stem: p for p in sorted(folder.glob("*.py")) if not p.stem.startswith("_")})
    return found


def load_experiment(name: str) -> ExperimentConfig:
    """Return the experiment `name`, from a file that must define `experiment() -> ExperimentConfig`.

    `name:variant` calls `experiment(variant)`. Raises ConfigError for an unknown name, with the valid ones and the
    nearest, and for a file that fails, with its line and the exception. A configuration's own errors are passed on.
    """
    # Folders of a path may have colons in their names.
    at = -1 if name.endswith(".py") else name.find(":", name.rfind(".py:") + 1)
    name, colon, variant = (name, "", "") if at < 0 else (name[:at], ":", name[at + 1 :])
    if name.endswith(".py"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"{name}: no such file. Valid names: {_names()}", parameter="exp_name")
    else:
        experiments = known_experiments()
        if name not in experiments:
            template = {} if colon else {n: f"hil_serl_template:{t}" for t in TASKS for n in (t, f"hil_serl_{t}")}
            meant = {known: known for known in experiments} | template  # HIL-SERL's names of its tasks, and ours
            near = difflib.get_close_matches(name, meant, 1)
            hint = f" (did you mean {meant[near[0]]!r}?)" if near else ""
            wrong = f"unknown experiment {name!r}{hint}. Valid: {_names()}, or the path of a .py file"
            raise ConfigError(wrong, parameter="exp_name")
        path = experiments[name]
    module = _load(path)
    factory = getattr(module, "experiment", None)
    if not callable(factory):
        raise ConfigError(f"{path} must define a function experiment() that returns an ExperimentConfig")
    if colon and not (variant and inspect.signature(factory).parameters):
        why = f"experiment() in {path} has no variants. Leave out the colon." if variant else "no text after the colon"
        raise ConfigError(f"{name}:{variant}: {why}", parameter="exp_name")
    try:
        config = factory(variant) if colon else factory()
    except SerlChunkError:
        raise
    except (Exception, SystemExit) as error:
        raise user_error(error, "experiment()", path) from error
    if not isinstance(config, ExperimentConfig):
        raise ConfigError(f"experiment() in {path} returned {type(config).__name__}, expected ExperimentConfig")
    return config


def _names() -> str:
    return ", ".join(known_experiments()) or "none found"


def _load(path: Path) -> ModuleType:
    name = f"serl_chunk_experiment_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _import_from(path.resolve())
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SerlChunkError) or not isinstance(error, Exception | SystemExit):
            raise
        raise user_error(error, "the import", path) from error
    return module


def _import_from(file: Path) -> None:
    """Let `file`, and what it calls later, import the modules next to it, as a script of Python may.

    ./experiments comes last, and so does a folder with a file named as an installed package: `ogbench.py` would hide
    the package that its robot needs. The packaged experiments import nothing from next to them.
    """
    folder = str(file.parent)
    if folder in sys.path or file.parent == packaged_folder().resolve():
        return
    names = {f.stem for f in file.parent.glob("*.py")} | {f.parent.name for f in file.parent.glob("*/__init__.py")}
    last = file.parent == (Path.cwd() / "experiments").resolve()
    hides = last or any(importlib.machinery.PathFinder.find_spec(name) for name in names)
    sys.path.insert(len(sys.path) if hides else 0, folder)


def user_error(
    error: BaseException, where: str = "", file: Path | None = None, *, kind: type[SerlChunkError] = ConfigError
) -> SerlChunkError:
    """Return an exception of the user's code as one sentence with its file, line and function.

    `where` is what was called, such as `make()`, where that is known; `file` is the file at fault, else the last one
    outside Python and this package is named; `kind` is the class that is returned.
    """
    walked = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    frames = [(Path(code.co_filename), line, code.co_qualname) for code, line in walked]
    if isinstance(error, SyntaxError) and error.filename:  # the code that does not parse never ran: it has no frame
        frames.append((Path(error.filename), error.lineno or 0, "<module>"))
    frames = [frame for frame in frames if not str(frame[0]).startswith("<")]
    known = None if file is None else file.resolve()
    own = [frame for frame in frames if (_is_users(frame[0]) if known is None else frame[0].resolve() == known)]
    path, line, function = own[-1] if own else frames[-1] if frames and known is None else (file or Path("?"), 0, "")
    place = f"{_shown(file or path)}:{line}" if line else _shown(file or path)
    place += f", in {function}" if function and not function.startswith("<") else ""
    last = frames[-1][0] if frames else path
    inside = [f"in {where}"] if where else []
    inside += [f"raised at {last}:{frames[-1][1]}"] if own and last.resolve() != path.resolve() else []
    remedy = f". {hint}" if (hint := _remedy(path, error)) else ""
    text = " ".join(re.sub(r"^\[Errno \d+\] ", "", str(error)).split())
    reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
    more = f" ({', '.join(inside)})" if inside else ""
    return kind(f"{place}: {reason}{more}{remedy}")


def in_users_code(error: BaseException) -> bool:
    """Return whether `error` was raised in, or passed through, a file outside Python and what is installed."""
    frames = (Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(_is_users(file) for file in frames if not str(file).startswith("<"))


@functools.cache
def _is_users(file: Path) -> bool:
    ours = (Path(__file__).parents[1], Path(serl_chunk_robot.__file__).parent, Path(sysconfig.get_paths()["stdlib"]))
    file, installed = file.resolve(), {"site-packages", "dist-packages"} & {*file.parts}
    return not installed and not any(file.is_relative_to(folder.resolve()) for folder in ours)


def _shown(file: Path) -> str:
    return str(file.relative_to(Path.cwd()) if file.is_absolute() and file.is_relative_to(Path.cwd()) else file)


def _remedy(file: Path, error: BaseException) -> str:
    if not isinstance(error, ImportError):
        return ""
    if isinstance(error, ModuleNotFoundError):
        return f"Install it for {sys.executable}, or put the module into {file.resolve().parent}."
    return "The module is there and lacks this: another version, or another module of that name."
