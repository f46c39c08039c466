"""Version and commit of the package."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from serl_chunk import version
from serl_chunk.version import VersionInfo, version_info


def test_the_version_is_that_of_the_project_and_the_text_has_both():
    project = Path(version.__file__).parents[1] / "pyproject.toml"
    assert f'version = "{version_info().version}"' in project.read_text()
    assert VersionInfo("1.2", "").text == "serl_chunk 1.2"
    assert VersionInfo("1.2", "ab12").text == "serl_chunk 1.2 (commit ab12)"


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_a_checkout_and_empty_elsewhere(tmp_path):
    assert version._commit(tmp_path) == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert version._commit(tmp_path) == ""  # no commit yet
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    commit = version._commit(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{12}", commit)
    (tmp_path / "file").write_text("2")
    assert version._commit(tmp_path) == f"{commit}-dirty"
