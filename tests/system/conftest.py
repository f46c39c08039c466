"""What every system test starts from: demonstrations, an environment for processes, a cluster to start them in."""

import os

import pytest
from processes import Process, cluster


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Of every process: unbuffered, no wandb, what one process compiled the next one need not."""
    cache = tmp_path_factory.mktemp("compiled")
    return os.environ | {
        "PYTHONUNBUFFERED": "1",
        "WANDB_MODE": "disabled",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # These networks are compiled for longer than they run.
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        "COLUMNS": "200",  # a table is not wrapped
    }


@pytest.fixture(scope="session")
def demos(tmp_path_factory, environment):
    """A folder of four scripted demonstrations, made by the command."""
    folder = tmp_path_factory.mktemp("demos")
    out = folder / "fake_aloha"
    process = Process(
        ["record", "--exp_name", "fake_aloha", "--n_demos", "4", "--out", str(out), "--policy", "scripted"],
        folder / "output.txt",
        environment,
    )
    try:
        process.ends()
    finally:
        process.close()
    return out


@pytest.fixture
def processes(tmp_path, demos, environment):
    """A cluster for one test."""
    with cluster(tmp_path, demos, environment) as c:
        yield c


@pytest.fixture(scope="module")
def module_processes(tmp_path_factory, demos, environment):
    """A cluster for the tests of one module."""
    with cluster(tmp_path_factory.mktemp("module"), demos, environment) as c:
        yield c
