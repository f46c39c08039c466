"""What every test module shares."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test, settings

SLOW = 1800  # seconds until a slow test is given up, where it does not say itself
KEPT = 2.5e9  # bytes; what is compiled is kept for the next modules up to here
CACHE = "JAX_COMPILATION_CACHE_DIR"
CACHE_LEAST = "JAX_PERSISTENT_CACHE_MIN"
TESTS = Path(__file__).parent
LONG = ("", "agents", "learner", "system")  # folders whose files take longest
MARKS = {"agents": "compiles", "models": "compiles", "system": "system"}  # of every test in a folder
COMPILING = ("agents", "learner", "models")  # folders whose tests compile quickly rather than well
# What JAX would do silently is an error, also in the processes that tests start. But for:
# optax's powers of mixed types (agents/optimiser.py, classifier/train.py); doubles (agents/test_exact_sums.py); pi0,
# which is written as openpi's code is, so that it has its numbers; the plain agents that benchmarks compare ours with.
STRICT = {"jax_numpy_dtype_promotion": "strict", "jax_numpy_rank_promotion": "raise"}
LENIENT = ("pi0", "test_serve", "test_benchmarks")  # parts of names of files
EXAMPLES = "SERL_CHUNK_TEST_EXAMPLES"  # the hypothesis profile: see tests/support/properties.py

logging.getLogger("serl_chunk").setLevel(logging.INFO)  # for `caplog`

settings.register_profile("default", deadline=None, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get(EXAMPLES, "default"))


def pytest_configure(config: pytest.Config) -> None:
    """Make JAX strict, and share what it compiles between the workers and the processes that tests start.

    The folder is new and empty for each run, and is removed after it. A folder that the environment names is kept.
    """
    # A shell starts what runs in the background with Ctrl-C ignored, and processes that tests start would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if CACHE not in os.environ:  # a worker of pytest-xdist inherits the folder of its controller
        folder = tempfile.mkdtemp(prefix="serl_chunk_compiled_")
        os.environ[CACHE] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # Small programs are compiled again and again: without these, only those of a second or more would be kept.
    os.environ.setdefault(f"{CACHE_LEAST}_COMPILE_TIME_SECS", "0")
    os.environ.setdefault(f"{CACHE_LEAST}_ENTRY_SIZE_BYTES", "-1")
    os.environ.update({name.upper(): value for name, value in STRICT.items()})
    if "jax" in sys.modules:  # a plugin imported it, and JAX reads the environment on import
        set_now = sys.modules["jax"].config.update
        for name, value in STRICT.items():
            set_now(name, value)
        set_now("jax_compilation_cache_dir", os.environ[CACHE])
        set_now("jax_persistent_cache_min_compile_time_secs", float(os.environ[f"{CACHE_LEAST}_COMPILE_TIME_SECS"]))
        set_now("jax_persistent_cache_min_entry_size_bytes", int(os.environ[f"{CACHE_LEAST}_ENTRY_SIZE_BYTES"]))
    # Tracing allocates much that lives long: with Python's own thresholds a tenth of the time is spent on cycles.
    gc.set_threshold(100_000, 20, 50)


def folder_of(path: Path) -> str:
    """Return the first folder of a file within the tests; empty for one that lies in none."""
    return path.relative_to(TESTS).parts[0] if path.parent != TESTS and path.is_relative_to(TESTS) else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark folders and property tests, and give slow tests a time limit of their own; pyproject.toml has the others'.

    Files that wait for processes and files that compile come first, in turn: what waits leaves its core to what
    compiles, and at the end of the queue only short files are left.
    """
    place: dict[Path, tuple[int, str]] = {}  # of a file: its number within its folder, the folder
    counts = dict.fromkeys(LONG, 0)
    for path in dict.fromkeys(item.path for item in items):
        folder = folder_of(path)
        place[path] = (counts[folder], folder) if folder in LONG else (len(items), "")
        counts[folder] = counts.get(folder, 0) + 1
    items.sort(key=lambda item: place[item.path])
    marks = {path: MARKS.get(folder_of(path)) for path in place}
    for item in items:
        if mark := marks[item.path]:
            item.add_marker(mark)
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("property")
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt what is there for the whole run from the garbage collector."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _bounded_memory() -> Iterator[None]:
    """A process forgets what JAX compiled once it is large: four of them would fill a machine of 16 GB otherwise."""
    yield
    statm = Path("/proc/self/statm")
    if "jax" in sys.modules and statm.exists() and int(statm.read_text().split()[1]) * 4096 > KEPT:
        sys.modules["jax"].clear_caches()
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def _few_optimisations(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of `COMPILING` compile quickly rather than well; what is computed stays the same."""
    if folder_of(request.path) not in COMPILING:
        yield
        return
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module", autouse=True)
def _lenient(request: pytest.FixtureRequest) -> Iterator[None]:
    """What JAX does silently is no error in the files of LENIENT, and in the processes that they start."""
    if not any(part in str(request.path) for part in LENIENT):
        yield
        return
    import jax

    lenient = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in lenient.items():
            patch.setenv(name.upper(), value)
            jax.config.update(name, value)
        yield
    for name, value in STRICT.items():
        jax.config.update(name, value)
