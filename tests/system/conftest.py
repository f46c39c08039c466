"""What every system test starts from: demonstrations, an environment for processes, a cluster to start them in."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import Command
from lab import Lab
from processes import LISTENING, Cluster, Process, cluster


class Listening(NamedTuple):
    """A learner that goes on with a completed run whose newest checkpoint is damaged, and waits for its actor."""

    run: Path
    learner: Process
    cluster: Cluster  # on its port


class Trained(NamedTuple):
    """A run that one learner and one actor completed, over encrypted connections on one machine."""

    run: Path
    output: str  # of both

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.run, to))


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Of every process: unbuffered, no wandb. Compiled programs are shared as tests/conftest.py says."""
    config = tmp_path_factory.mktemp("config")  # no user's own keys
    return os.environ | {
        "PYTHONUNBUFFERED": "1",
        "WANDB_MODE": "disabled",
        "XDG_CONFIG_HOME": str(config),
        "JAX_PLATFORMS": "cpu",
        # These networks are compiled for longer than they run.
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
        + os.environ.get("XLA_FLAGS", ""),
        "COLUMNS": "200",  # a table is not wrapped
    }


@pytest.fixture(scope="session")
def demos(tmp_path_factory, environment):
    folder = tmp_path_factory.mktemp("demos")
    words = ["record", "--exp_name", "fake_aloha", "--n_demos", "4", "--policy", "scripted", "--out"]
    Command([*words, str(folder / "fake_aloha")], folder / "output.txt", environment).ends()
    return folder / "fake_aloha"


@pytest.fixture(scope="session")
def trained(tmp_path_factory, demos, environment):
    folder = tmp_path_factory.mktemp("trained")
    with cluster(folder, demos, environment) as c:
        keys = ("--bind", "0.0.0.0", "--keys", str(folder / "keys"))
        return Trained(folder / "run", c.both(folder / "run", *keys).ends())


@pytest.fixture(scope="session")
def listening(tmp_path_factory, trained, demos, environment):
    folder = tmp_path_factory.mktemp("listening")
    run = trained.copy(folder / "run")
    for file in (run / "checkpoints" / "40" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"\x00" * file.stat().st_size)
    with cluster(folder, demos, environment) as c:
        learner = c.learner(run, **LISTENING)
        learner.says("listening on")
        yield Listening(run, learner, c)


@pytest.fixture
def processes(tmp_path, demos, environment):
    with cluster(tmp_path, demos, environment) as c:
        yield c


@pytest.fixture
def lab(tmp_path, environment):
    with contextlib.closing(Lab(tmp_path, environment)) as lab:
        yield lab
