"""Version and commit of the package."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from serl_chunk import version
from serl_chunk.version import VersionInfo, version_info


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
