"""What we write, loaded by lerobot itself, and what lerobot writes, read by us. Only where lerobot is installed.

    python3 -m venv /some/where && /some/where/bin/pip install lerobot==0.4.4    # 7 GB with torch; 5 minutes
    SERL_CHUNK_LEROBOT_PYTHON=/some/where/bin/python pytest tests/data/lerobot/test_lerobot_library.py

That interpreter runs in a process of its own, with no network and a throw-away cache; it needs nothing of ours.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("av")

from lerobot_sets import HZ, several, smooth, write

from serl_chunk.data.frames import decode_image
from serl_chunk.data.lerobot.rows import newest
from serl_chunk.data.lerobot.writer import LeRobotSink
from serl_chunk.data.paths import open_episodes
from serl_chunk.data.source import ReadOptions, decode_images
from serl_chunk.types import Outcome

PYTHON = os.environ.get("SERL_CHUNK_LEROBOT_PYTHON")
pytestmark = pytest.mark.skipif(not PYTHON, reason="SERL_CHUNK_LEROBOT_PYTHON names no interpreter that has lerobot")

LOAD = """
import sys
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
root, out = sys.argv[1:3]
deltas = {"action": [i / 50 for i in range(4)]}
data = LeRobotDataset("local/test", root=root, delta_timestamps=deltas, video_backend="pyav")
keys = [k for k in data[0] if k != "task"]
items = [data[i] for i in range(len(data))]
columns = {k: np.stack([np.asarray(item[k]) for item in items]) for k in keys}
stats = {f"stats/{k}/{n}": np.asarray(v) for k, s in data.meta.stats.items() for n, v in s.items()}
np.savez(out, task=np.array([item["task"] for item in items]), episodes=data.meta.total_episodes, **columns, **stats)
"""

WRITE = """
import sys
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
root, source, videos = sys.argv[1], np.load(sys.argv[2]), sys.argv[3] == "video"
image = {"dtype": "video" if videos else "image", "shape": (64, 96, 3), "names": ["height", "width", "channels"]}
features = {
    "observation.state": {"dtype": "float32", "shape": (4,), "names": None},
    "action": {"dtype": "float32", "shape": (3,), "names": None},
    "observation.images.top": image,
    "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    "next.done": {"dtype": "bool", "shape": (1,), "names": None},
}
data = LeRobotDataset.create("local/test", fps=50, root=root, features=features, use_videos=videos)
for e, n in enumerate(source["lengths"]):
    for t in range(n):
        last = t == n - 1
        data.add_frame({
            "observation.state": source[f"state{e}"][t], "action": source[f"action{e}"][t],
            "observation.images.top": source[f"top{e}"][t],
            "next.reward": np.array([float(last)], np.float32), "next.done": np.array([last]),
            "task": ["stack", "insert"][e % 2],
        })
    data.save_episode()
data.finalize()
"""


def run(tmp_path: Path, code: str, *arguments: Any) -> None:
    assert PYTHON
    environment = os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONPATH", None)
    command = [PYTHON, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("mode", ["image", "video"])
def test_lerobot_loads_what_we_write(tmp_path: Path, mode: str):
    episodes = several()
    folder = write(LeRobotSink(tmp_path / "set", mode=mode, data_file_mb=0.02, video_file_mb=0.005), episodes)
    assert len(list(folder.glob("data/*/*.parquet"))) > 1 or mode == "video"
    run(tmp_path, LOAD, folder, tmp_path / "items.npz")
    found = np.load(tmp_path / "items.npz")
    lengths = [e.steps.n for e in episodes]
    rows = [(e, t) for e, n in enumerate(lengths) for t in range(n)]
    assert (found["episodes"], found["task"].tolist()) == (len(episodes), [episodes[e].begin.task for e, _ in rows])
    assert found["episode_index"].tolist() == [e for e, _ in rows]
    assert (found["observation.state"] == np.concatenate([e.steps.observation["state"] for e in episodes])).all()
    for (e, t), chunk, padded in zip(rows, found["action"], found["action_is_pad"], strict=True):
        ticks = np.minimum(np.arange(t, t + 4), lengths[e] - 1)
        assert (chunk == episodes[e].steps.action[ticks]).all()
        assert padded.tolist() == [t + i >= lengths[e] for i in range(4)]
    for name in ("policy_version", "decision_tick", "source", "policy_age", "stamp"):
        wanted = np.concatenate([getattr(e.steps, name) for e in episodes])
        assert (found[f"complementary_info.{name}"] == wanted.astype(found[f"complementary_info.{name}"].dtype)).all()
    assert found["next.success"].nonzero()[0].tolist() == [np.cumsum(lengths)[i] - 1 for i in (0, 1, 4)]
    for camera in ("top", "wrist"):
        frames = found[f"observation.images.{camera}"]
        assert frames.shape == (len(rows), 3, 16, 24)
        newest_of = [newest(e.steps.sparse[f"images/{camera}"].index, e.steps.n) for e in episodes]
        wanted = [episodes[e].steps.sparse[f"images/{camera}"].values[newest_of[e][t]] for e, t in rows]
        error = np.abs(frames.transpose(0, 2, 3, 1) * 255 - np.stack(wanted))
        assert error.max() < (0.01 if mode == "image" else 40)
        assert error.mean() < (0.01 if mode == "image" else 4)
    np.testing.assert_allclose(
        found["stats/action/q99"],
        np.quantile(np.concatenate([e.steps.action for e in episodes]), 0.99, axis=0),
        rtol=1e-5,
    )
    assert found["stats/observation.images.top/mean"].shape == (3, 1, 1)


@pytest.mark.parametrize("mode", ["image", "video"])
def test_we_read_what_lerobot_writes(tmp_path: Path, mode: str):
    rng = np.random.default_rng(0)
    lengths = [7, 5, 6]
    given: dict[str, Any] = {"lengths": np.array(lengths)}
    for e, n in enumerate(lengths):
        given[f"state{e}"] = rng.normal(size=(n, 4)).astype(np.float32)
        given[f"action{e}"] = rng.normal(size=(n, 3)).astype(np.float32)
        given[f"top{e}"] = np.stack([smooth(e, t, 64, 96) for t in range(n)])  # AV1 knows no smaller ones
    np.savez(tmp_path / "given.npz", **given)
    run(tmp_path, WRITE, tmp_path / "set", tmp_path / "given.npz", mode)
    source = open_episodes(tmp_path / "set", ReadOptions())
    assert (source.format, source.hz) == ("lerobot", HZ)
    for e, key in enumerate(source.keys()):
        begin, steps, end = decode_images(source.read(key))
        assert (end.outcome, end.terminated, end.length) == (Outcome.SUCCESS, True, lengths[e] - 1)
        assert begin.task == ["stack", "insert"][e % 2]
        assert (steps.action == given[f"action{e}"][:-1]).all()
        assert (steps.observation["state"] == given[f"state{e}"][:-1]).all()
        assert steps.reward.tolist() == [0.0] * (lengths[e] - 2) + [1.0]
        error = np.abs(steps.sparse["images/top"].values.astype(float) - given[f"top{e}"][:-1])
        assert error.mean() < (0.01 if mode == "image" else 8)
    if mode == "image":
        stored = source.read(source.keys()[0]).steps.sparse["images/top"].values.encoded(2)
        assert stored is not None
        assert (decode_image(stored, "") == given["top0"][2]).all()
