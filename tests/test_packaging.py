"""What is committed and what an installed package contains."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def git(*words: str) -> list[str]:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no git checkout")
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def folders() -> set[str]:
    """Dotted names of the folders that hold modules, experiments included."""
    found = {path.parent.relative_to(ROOT) for path in (ROOT / "serl_chunk").rglob("*.py")}
    return {".".join(folder.parts) for folder in found} | {"serl_chunk.experiments"}


def test_no_tracked_path_is_ignored():
    assert git("ls-files", "--cached", "--ignored", "--exclude-standard") == []


def test_no_module_is_ignored():
    """A pattern without a leading slash would keep a whole room out of a commit."""
    modules = [str(p.relative_to(ROOT)) for folder in ("serl_chunk", "tests") for p in (ROOT / folder).rglob("*.py")]
    command = ["git", "check-ignore", "--no-index", *modules]
    assert len(modules) > 300
    git("status", "--short")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == []


def test_every_folder_is_a_listed_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == folders()
    assert [name for name in folders() if not _folder_of(name).joinpath("__init__.py").is_file()] == []


def _folder_of(package: str) -> Path:
    return ROOT / "experiments" if package == "serl_chunk.experiments" else ROOT.joinpath(*package.split("."))


IMPORT_ALL = """
import importlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
files = sorted((root / "serl_chunk").rglob("*.py"))
for file in files:
    name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    if not name.startswith("serl_chunk.experiments.") and not name.endswith("__main__"):
        module = importlib.import_module(name)
        assert pathlib.Path(module.__file__) == file, module.__file__
from serl_chunk.config.loader import known_experiments, load_experiment
names = known_experiments()
for name in names:
    load_experiment(name)
print(len(files), *names)
"""


def test_the_wheel_holds_every_module_and_experiment(tmp_path):
    """Built from a copy, installed alone into an empty folder, and imported from there."""
    source, target = tmp_path / "source", tmp_path / "target"
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("serl_chunk", "experiments"):
        shutil.copytree(ROOT / name, source / name, ignore=leave)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source], check=True, timeout=240
    )
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", target, wheel], check=True, timeout=240)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, target], cwd=tmp_path, env={"PYTHONPATH": str(target), "PATH": ""},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    n, *experiments = done.stdout.split()
    sources = [p for name in ("serl_chunk", "experiments") for p in (ROOT / name).rglob("*.py")]
    assert int(n) == len(sources)
    assert {"fake_aloha", "ogbench", "hil_serl_template"} <= set(experiments)
