"""The run folder: created or resumed, locked, with its config.json."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.overrides import difference, to_dict
from serl_chunk.config.renamed import current_config
from serl_chunk.types import ConfigError, RobotSpec

CONFIG = "config.json"  # in a run folder


class RunFolder(NamedTuple):
    """A run's folder, locked for this process, and whether it held a run before."""

    path: Path
    run_id: str
    resumed: bool
    lock: IO[str]
    config: dict[str, Any]  # what `write_config` writes
    fresh: bool = False  # this process made it

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock it until the end. A start that was refused takes a fresh folder away again: nothing was recorded."""
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
        """Write config.json, once this life has all that it starts with: until then the last life's stays.

        Raises ConfigError where it cannot be written.
        """
        try:
            write_json(self.path / CONFIG, self.config)
        except OSError as error:
            raise ConfigError(f"--checkpoint_path={self.path} cannot be used: {error}") from error


def open_run(
    config: ExperimentConfig, spec: RobotSpec, checkpoint_path: str | None, tell: Callable[[str], None] = print
) -> RunFolder:
    """Create or resume the run folder; prints what changed since the last life.

    `lock` is held until it is closed; config.json is written by `RunFolder.write_config`. Raises ConfigError where
    another learner holds the folder, where it is another experiment's, and where it cannot be used.
    """
    if checkpoint_path is None:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        path = Path("runs") / config.name / stamp
    else:
        path = Path(checkpoint_path).expanduser()
    try:
        fresh = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "run.lock").open("w")
    except OSError as error:
        raise ConfigError(f"--checkpoint_path={path} cannot be used: {error}") from error
    try:
        saved, resumed = _claim(path, lock, config, spec, tell)
    except OSError as error:
        lock.close()
        raise ConfigError(f"--checkpoint_path={path} cannot be used: {error}") from error
    except ConfigError:
        lock.close()
        raise
    return RunFolder(path, saved["run_id"], resumed, lock, saved, fresh)


def _claim(
    path: Path, lock: IO[str], config: ExperimentConfig, spec: RobotSpec, tell: Callable[[str], None]
) -> tuple[dict[str, Any], bool]:
    """Lock the folder; returns what its config.json is to hold, and whether it held a run before."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{path} is in use by another learner; stop it, or give another --checkpoint_path") from None
    file = path / CONFIG
    new: dict[str, Any] = {**to_dict(config), "robot_spec": spec.to_json(), "run_id": uuid.uuid4().hex}
    resumed = file.exists()
    if resumed:
        old = read_config(path)
        if old.get("name") != config.name:
            raise ConfigError(
                f"{path} is a run of experiment {old.get('name')!r}, not {config.name!r}; "
                "give another --checkpoint_path"
            )
        if former := current_config(json.loads(file.read_text()))[1]:
            tell(f"{file} has former names of settings: {'; '.join(former)}")
        new["run_id"] = old.get("run_id", new["run_id"])
        for line in difference(old, json.loads(json.dumps(new))):
            tell(f"config changed since the last start (the new value wins): {line}")
    return new, resumed


def write_json(file: Path, value: Any) -> None:
    """Write `file` whole or not at all; raises OSError."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(temporary, file)


def read_config(run: Path) -> dict[str, Any]:
    """`config.json` of a run under current names of settings; raises ConfigError where it is absent or damaged."""
    file = run / CONFIG
    try:
        saved = json.loads(file.read_text())
        return current_config(saved)[0] if isinstance(saved, dict) else saved
    except FileNotFoundError:
        raise ConfigError(f"{run} is not a run folder: it has no config.json") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is damaged ({error}); restore it, or remove it to write it anew") from None
