"""The run folder: created or resumed, locked, with its config.json."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import importlib.metadata
import json
import logging
import platform
import shlex
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.overrides import difference, to_dict
from serl_chunk.io import atomic_write, folder_fault
from serl_chunk.types import ConfigError, RobotSpec
from serl_chunk.version import VersionInfo, version_info

logger = logging.getLogger(__name__)

CONFIG = "config.json"  # in a run folder
RUN_LOCK = "run.lock"  # the same; its learner holds it
FORMAT = 6  # of run folders


class RunFolder(NamedTuple):
    """A run's folder, locked for this process, and whether it held a run before."""

    path: Path
    run_id: str
    resumed: bool
    lock: IO[str]
    config: dict[str, Any]  # for `write_config`
    fresh: bool = False  # this process made it

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock it until the end, and remove a fresh folder of a start that was refused: nothing was recorded."""
        with self.lock:
            try:
                yield
            finally:
                self.discard_fresh()

    def discard_fresh(self) -> None:
        """Remove the folder where this process made it and has not written its config.json."""
        if self.fresh and not (self.path / CONFIG).exists():
            shutil.rmtree(self.path, ignore_errors=True)

    def write_config(self) -> None:
        """Write config.json, once this process has all that it starts with; raises ConfigError where it cannot."""
        try:
            write_json(self.path / CONFIG, self.config)
        except OSError as error:
            raise ConfigError(folder_fault(self.path, error), parameter="checkpoint_path") from error


def open_run(config: ExperimentConfig, spec: RobotSpec, checkpoint_path: str | None) -> RunFolder:
    """Create or resume the run folder, and log what changed since the previous process.

    Raises ConfigError if another learner uses it, or it is of another experiment or format, or unusable.
    """
    new = Path("runs") / config.name / datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path = new if checkpoint_path is None else Path(checkpoint_path).expanduser()
    try:
        fresh = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            lock = stack.enter_context((path / RUN_LOCK).open("w"))
            saved, resumed = _claim(path, lock, config, spec)
            stack.pop_all()
    except OSError as error:
        raise ConfigError(folder_fault(path, error), parameter="checkpoint_path") from error
    return RunFolder(path, saved["run_id"], resumed, lock, saved, fresh)


def lock_run(
    path: Path, lock: IO[str], remedy: str = ", then try again", *, parameter: str = "run", holder: str = "learner"
) -> None:
    """Lock a folder by its open lock file; raises ConfigError where another `holder` uses it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{path} is in use by another {holder}. Stop it{remedy}", parameter=parameter) from None


def _claim(path: Path, lock: IO[str], config: ExperimentConfig, spec: RobotSpec) -> tuple[dict[str, Any], bool]:
    """Lock the folder; return the new content of its config.json, and whether it held a run before."""
    lock_run(path, lock, ", or choose another folder", parameter="checkpoint_path")
    new: dict[str, Any] = {**to_dict(config), "robot_spec": spec.to_json(), "run_id": uuid.uuid4().hex}
    resumed = (path / CONFIG).exists()
    if resumed:
        old = read_config(path)
        if old.get("name") != config.name:
            text = f"{path} is a run of experiment {old.get('name')!r}, not {config.name!r}. Choose another folder"
            raise ConfigError(text, parameter="checkpoint_path")
        if unknown := _unknown_fields({k: v for k, v in old.items() if k not in OWN_FIELDS}, config):
            remedy = f"Resume the run with {_writer(old)}, or remove the setting from the file"
            raise ConfigError(f"{path / CONFIG}: this version has no setting {', '.join(unknown)}. {remedy}")
        if old.get("serl_chunk") != version_info()._asdict():
            logger.info("run folder %s was last written by %s", path, _writer(old))
        new["run_id"] = old.get("run_id", new["run_id"])
        settings = {name: value for name, value in old.items() if name not in _OF_PROCESS}
        for line in difference(settings, json.loads(json.dumps(new))):
            logger.info("config changed since the last start (the new value wins): %s", line)
    return {**new, "format": FORMAT, "serl_chunk": version_info()._asdict(), "process": _process()}, resumed


_OF_PROCESS = ("format", "serl_chunk", "process")  # fields of config.json that describe the process that wrote it
OWN_FIELDS = (*_OF_PROCESS, "robot_spec", "run_id")  # fields of config.json that are no settings


def _process() -> dict[str, str]:
    program, *arguments = sys.argv
    if Path(program).name == "__main__.py":  # of this package, as `python -m` starts it
        program = "serl-chunk"
    return {
        "host": platform.node(),
        "command": shlex.join([program, *arguments]),
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
    }


def _unknown_fields(saved: Mapping[str, Any], config: Any, prefix: str = "") -> list[str]:
    """Return paths of the settings in `saved` that `config`, a dataclass, lacks; another kind's are left out."""
    names = {field.name for field in dataclasses.fields(config)}
    if saved.get("kind", "") != getattr(config, "kind", ""):
        return []
    unknown = [f"{prefix}{name}" for name in saved if name not in names | {"kind"}]
    for name in names & saved.keys():
        group = getattr(config, name)
        if dataclasses.is_dataclass(group) and isinstance(saved[name], dict):
            unknown += _unknown_fields(saved[name], group, f"{prefix}{name}.")
    return sorted(unknown)


def _writer(saved: Mapping[str, Any]) -> str:
    origin = saved.get("serl_chunk") or {}
    return VersionInfo(origin.get("version", "of an unrecorded version"), origin.get("commit", "")).text


def write_json(file: Path, value: Any) -> None:
    """Write `file` whole or not at all; raises OSError."""
    atomic_write(file, json.dumps(value, indent=2) + "\n")


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a run folder; raises ConfigError where it is absent or damaged."""
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{file.parent} is not a run folder: it has no {file.name}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is damaged ({error}). Restore or remove it") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is damaged: it holds a {type(content).__name__}. Restore or remove it")
    return content


def read_config(run: Path) -> dict[str, Any]:
    """Return `config.json` of a run; raises ConfigError where it is absent, damaged or of another format."""
    file = run / CONFIG
    saved = read_json(file)
    if (number := saved.get("format")) != FORMAT:
        remedy = f"Use {_writer(saved)}, which wrote it, or start a new run in another folder"
        raise ConfigError(f"{file}: format of the run folder is {number!r} (expected {FORMAT}). {remedy}")
    return saved
