"""The page that needs no viewer: whole, below its size, and open about what it lacks."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import viewed
from coded_episodes import SPEC
from errors import naming
from PIL import Image
from viewed import KINDS

from serl_chunk.data.formats.hdf5 import write_episode
from serl_chunk.data.labels import write_label
from serl_chunk.data.paths import open_episodes
from serl_chunk.data.source import ReadOptions
from serl_chunk.runs.episodes import FORMAT
from serl_chunk.types import ConfigError, DataError
from serl_chunk.viewer import export
from serl_chunk.viewer.export import write_page

AMPLE = 5_000_000


def written(source_path: Path, out: Path, numbers=range(4), max_bytes: int = AMPLE) -> tuple[dict, str]:
    source = open_episodes(source_path, ReadOptions(labels=False), None, (FORMAT,))
    line = write_page(out, source, list(numbers), max_bytes)
    assert out.stat().st_size <= max_bytes
    (content,) = re.findall(r'<script type="application/json" id="embedded">(.*?)</script>', out.read_text(), re.S)
    return json.loads(content), line


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_holds_everything_where_it_fits(tmp_path, kind):
    page, line = written(KINDS[kind](tmp_path / "data"), tmp_path / "page.html")
    assert len(page["list"]["rows"]) == 4
    assert sorted(page["episodes"]) == ["0", "1", "2", "3"]
    for content in page["episodes"].values():
        for camera in content["cameras"]:
            assert len(camera["files"]) == len(camera["ticks"]) > 0
            file = base64.b64decode(camera["files"][0].removeprefix("data:image/jpeg;base64,"))
            assert np.asarray(Image.open(io.BytesIO(file))).shape[:2] == (camera["height"], camera["width"])
        assert "left_out" not in content
    assert page["info"]["left_out"] == ""
    assert "left out" not in line


def test_a_size_below_the_list_is_refused_with_one_that_works(tmp_path):
    folder, page = viewed.hdf5_folder(tmp_path / "data"), tmp_path / "page.html"
    with pytest.raises(ConfigError, match=naming("4 episodes")) as error:
        written(folder, page, max_bytes=10_000)
    assert error.value.parameter == "size_mb"
    assert not page.exists()
    written(folder, page, max_bytes=int(1e6 * float(re.findall(r"at least ([\d.]+)", str(error.value))[0])))


def test_chosen_episodes_labels_reasons_and_texts(tmp_path):
    folder = viewed.hdf5_folder(tmp_path / "data")
    write_label(folder, "episode_1.hdf5", "discard", None)
    (folder / "episode_2.hdf5").write_bytes(b"no HDF5")
    nasty = "</script><script>alert(1)</script>"  # which cannot end the script
    episode = viewed.episodes()[0]
    write_episode(folder / "episode_0.hdf5", episode._replace(begin=episode.begin._replace(task=nasty)), SPEC)
    page, _ = written(folder, tmp_path / "page.html", numbers=[1, 2, 3])
    assert sorted(page["episodes"]) == ["1", "3"]
    rows = page["list"]["rows"]
    assert [row["label"] for row in rows] == ["", "discard", "", ""]
    assert "episode_2.hdf5" in rows[2]["error"]
    assert rows[0]["task"] == nasty
    text = (tmp_path / "page.html").read_text()
    assert nasty not in text
    assert not re.search(r"https?:|<link rel=.stylesheet|<script src", text), "it needs no other file and no network"
    assert "--state:" in text


def test_a_file_that_exists_stays_and_a_disk_that_is_full_is_named(tmp_path, monkeypatch):
    folder = viewed.hdf5_folder(tmp_path / "data")
    (tmp_path / "page.html").write_text("mine")
    with pytest.raises(ConfigError, match=naming(tmp_path / "page.html")) as error:
        written(folder, tmp_path / "page.html")
    assert error.value.parameter == "out"
    assert (tmp_path / "page.html").read_text() == "mine"
    with pytest.raises(ConfigError, match=naming(tmp_path / "none")):
        written(folder, tmp_path / "none" / "page.html")
    monkeypatch.setattr(export, "atomic_write", lambda path, content: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(DataError, match=naming(tmp_path / "new.html", "full")):
        written(folder, tmp_path / "new.html")
