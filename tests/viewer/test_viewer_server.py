"""The viewer as a browser meets it: who is let in, the list, an episode, its frames."""

from __future__ import annotations

import io
import socket

import numpy as np
import pytest
import viewed
from PIL import Image
from viewed import KINDS, LENGTH, OUTCOMES, viewing

from serl_chunk.data.paths import open_episodes
from serl_chunk.data.source import ReadOptions
from serl_chunk.runs.episodes import FORMAT


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    where = tmp_path_factory.mktemp("viewed")
    return {kind: write(where / kind) for kind, write in KINDS.items()}


@pytest.fixture(scope="module")
def browser(folders):
    with viewing(folders["run"]) as browser:
        yield browser


RESOURCES = ["", "page.js", "page.css", "info", "list/0", "episode/0", "frame/0/a/0"]
HOSTS = ["evil.example", "127.0.0.1", "evil.example:{port}", "127.0.0.1:1", "[::1]:{port}", ""]


@pytest.mark.parametrize("path", RESOURCES)
def test_nothing_is_shown_without_the_token_and_to_another_host_name(browser, path):
    assert browser.request(path).status == 200
    token = browser.prefix.strip("/")
    for wrong in ("", "/x", f"/{token[:-1]}", f"/{token}x", f"/{token.swapcase()}", "/%c3%a9"):
        answer = browser.request(f"{wrong}/{path}", whole=True)
        assert answer.status == 403
        assert token.encode() not in answer.body
    for host in HOSTS:
        assert browser.request(path, headers={"Host": host.format(port=browser.port)}).status == 403
    assert browser.request(path, headers={"Host": f"localhost:{browser.port}"}).status == 200


def test_a_page_of_another_origin_is_refused_and_none_of_its_scripts_run(browser):
    headers = {"Content-Type": "application/json", "Origin": "http://evil.example"}
    assert browser.request("label/0", body=b'{"label":"failure"}', headers=headers).status == 403
    assert browser.rows()[0]["label"] == ""
    own = {"Origin": f"http://127.0.0.1:{browser.port}"}
    assert browser.request("info", headers=own).status == 200
    with pytest.raises(ConnectionRefusedError):  # a server of all addresses would take this one
        socket.create_connection(("127.0.0.2", browser.port), timeout=5)
    headers = browser.request("").headers
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert (headers["Referrer-Policy"], headers["Cache-Control"]) == ("no-referrer", "no-store")
    page = browser.request("").body.decode() + browser.request("page.css").body.decode()
    assert "http:" not in page
    assert "https:" not in page


@pytest.fixture(scope="module", params=KINDS)
def kind_and_browser(request, folders):
    with viewing(folders[request.param]) as browser:
        yield request.param, browser


def test_the_list_has_every_episode_and_each_its_curves_segments_gaps_and_values(kind_and_browser):
    kind, browser = kind_and_browser
    rows = browser.rows()
    assert browser.get("info")["total"] == len(rows) == 4
    assert [row["number"] for row in rows] == [0, 1, 2, 3]
    assert not any(row["error"] for row in rows)
    if kind == "lerobot":
        assert {row["outcome"] for row in rows} == {"success"}
        return
    assert [row["outcome"] for row in rows] == [str(o) for o in OUTCOMES]
    assert [row["reward"] for row in rows] == [1, 0, 0, 1]
    assert [row["human"] for row in rows] == pytest.approx([k / LENGTH for k in range(4)], abs=1e-5)
    assert [row["lowest_q"] for row in rows] == [0, -1, -2, -3]
    assert [row["task"] for row in rows] == [f"task {k}" for k in range(4)]
    assert {row["length"] for row in rows} == {LENGTH}
    content, recorded = browser.get("episode/2"), viewed.episodes()[2]
    np.testing.assert_allclose(np.array(content["state"]).T, recorded.steps.observation["state"], rtol=1e-5)
    np.testing.assert_allclose(np.array(content["action"]).T, recorded.steps.action, rtol=1e-5)
    assert content["actors"] == [[3, 12, "policy"], [0, 2, "human"], [2, 3, "hold"]]
    assert content["gaps"] == [[6, 9]]
    q = {"ticks": [0, 5, 10], "q": [1, -1.5, -2], "low": [0, -3, -9], "high": [1, -1.5, -2], "std": [0.25, 0.5, 2]}
    assert content["q"] == q
    assert [camera["name"] for camera in content["cameras"]] == ["a", "b"]
    assert content["cameras"][1]["ticks"] == [0, 3, 6, 9]
    assert content["hz"] == 50
    # A run names the joint of its second action; such an HDF5 file does not.
    assert [p["action"] for p in content["panels"]] == [0, 1, None, None] + [None] * (kind == "hdf5")


def test_frames_are_those_that_were_recorded(kind_and_browser, folders):
    kind, browser = kind_and_browser
    camera = browser.get("episode/1")["cameras"][1]
    answer = browser.request(f"frame/1/{camera['name']}/1")
    assert answer.headers["Content-Type"] in ("image/jpeg", "image/png")
    image = np.asarray(Image.open(io.BytesIO(answer.body)).convert("RGB"))
    source = open_episodes(folders[kind], ReadOptions(), None, (FORMAT,))
    rows = source.read(source.keys()[1]).steps.sparse[f"images/{camera['name']}"]
    assert image.shape == (camera["height"], camera["width"], 3)
    assert np.abs(image.astype(int) - np.asarray(rows.values[1]).astype(int)).mean() < 20  # a few pixels, as JPEG
    assert browser.request(f"frame/1/{camera['name']}/1").body == answer.body


@pytest.mark.parametrize(
    "path", ["episode/4", "episode/-1", "episode/x", "episode/9999999999", "frame/0/none/0", "frame/0/a/99", "nothing",
             "list/x", "../info", "frame/0/a", "episode/0/more", "label/0"],
)  # fmt: skip
def test_what_is_not_there_is_refused(browser, path):
    answer = browser.request(path)
    assert answer.status in (404, 422)
    assert answer.json["error"]
    assert browser.request("info").status == 200
