"""From `--exp_name` to an experiment: a packaged name, a name in ./experiments, or the path of a .py file."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.types import ConfigError


def _packaged_folder() -> Path:
    spec = importlib.util.find_spec("serl_chunk.experiments")
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(__file__).resolve().parents[2] / "experiments"  # a source tree that was not installed


def known_experiments() -> dict[str, Path]:
    """`name -> file` of the packaged experiments and of those in ./experiments, which win."""
    found = {}
    for folder in (_packaged_folder(), Path.cwd() / "experiments"):
        if folder.is_dir():
            found.update({p.stem: p for p in sorted(folder.glob("*.py")) if not p.stem.startswith("_")})
    return found


def load_experiment(name: str) -> ExperimentConfig:
    """The experiment `name`; raises ConfigError listing the valid names and the nearest one.

    The file must define `experiment() -> ExperimentConfig`.
    """
    if name.endswith(".py"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"--exp_name={name}: there is no such file; valid names: {_names()}")
    else:
        experiments = known_experiments()
        if name not in experiments:
            near = difflib.get_close_matches(name, experiments, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(f"unknown experiment {name!r}{hint} Valid: {_names()}, or the path of a .py file.")
        path = experiments[name]
    module = _load(path)
    factory = getattr(module, "experiment", None)
    if not callable(factory):
        raise ConfigError(f"{path} must define a function experiment() that returns an ExperimentConfig")
    config = factory()
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
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError, NameError) as error:
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
