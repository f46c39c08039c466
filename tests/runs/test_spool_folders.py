"""An actor's spools: those of other runs are named, whatever happens to the files meanwhile."""

from pathlib import Path

import pytest
from counting_robot import experiment
from errors import naming

from serl_chunk.transport.storage.journal import Journal
from serl_chunk.transport.storage.spool import SpoolFolders
from serl_chunk.types import ConfigError


def test_what_other_runs_left_behind_is_counted_while_the_open_spool_is_trimmed(tmp_path, monkeypatch):
    spools = SpoolFolders(experiment(), "left", tmp_path)
    spool = spools.open("this")
    assert spools.folder == tmp_path / "counting_robot" / "left"
    other = Journal(spools.folder / "other")
    other.append([b"kept"])
    other.close()
    kept = other.nbytes
    (spools.folder / "other_damaged").mkdir()
    (spools.folder / "other_damaged" / "0.journal").write_bytes(b"damaged")
    (spools.folder / "gone").mkdir()
    (spools.folder / "gone" / "0.journal").write_bytes(b"going")
    (spools.folder / "this" / "0.journal").write_bytes(b"going")
    stat = Path.stat

    def vanished(path: Path, **options: bool):
        if path.name == "0.journal":
            path.unlink()
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", vanished)
    try:
        assert spools.left_behind() == [(spools.folder / "other", kept)]
    finally:
        spool.close()


def test_a_second_actor_of_that_name_is_refused_by_its_flag(tmp_path):
    spool = SpoolFolders(experiment(), "left", tmp_path).open("run")
    try:
        with pytest.raises(ConfigError, match=naming("actor_id", "left", tmp_path)):
            SpoolFolders(experiment(), "left", tmp_path).open("run")
    finally:
        spool.close()
