"""The estimate is what a full replay takes, and more than there is is refused."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from coded_episodes import SPEC, config, preprocess
from coded_replay import RNG, build, coded
from errors import naming

from serl_chunk.replay import replay as replay_module
from serl_chunk.replay.memory import available_bytes, estimate_bytes
from serl_chunk.replay.replay import Replay
from serl_chunk.types import Begin, CameraSpec, ConfigError, SparseRows, StepBlock


def filled() -> dict[str, float]:
    """What this process's memory grew by while a replay was made, and was filled."""
    statm = Path("/proc/self/statm")

    def resident() -> int:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    side = 128
    spec = dataclasses.replace(SPEC, cameras=(CameraSpec("a", side, side), CameraSpec("b", side, side)))
    cfg = config(capacity=1_500, demo_capacity=100, human_capacity=100, image_capacity=1_500)
    images = {f"images/{c}": RNG(0).integers(0, 256, (40, side, side, 3), np.uint8) for c in "ab"}
    sparse = {key: SparseRows(np.arange(39), v[:39]) for key, v in images.items()}
    before = resident()
    replay = Replay(spec, cfg, preprocess(cfg, ("a", "b"), spec), bc_on="demo")
    made = resident() - before
    for k in range(80):  # twice round the ring
        episode = coded(k, 39)
        steps = StepBlock.from_steps(episode.episode_id, [episode.step(t) for t in range(39)])
        final = episode.observation(39) | {key: v[39] for key, v in images.items()}
        replay.insert("s", Begin(episode.episode_id))
        replay.insert("s", dataclasses.replace(steps, sparse=sparse))
        replay.insert("s", episode.end_record()._replace(final_observation=final))
    stats = replay.stats()
    frames = stats["replay/online_frames"]
    unique = frames * side * side * 3
    grown = resident() - before
    return {"made": made, "grown": grown, "said": stats["replay/bytes"], "frames": frames, "unique": unique}


def test_memory_of_a_full_replay_is_within_five_percent_of_its_unique_bytes():
    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read from /proc")
    # In a process of its own: this one may hold memory that it freed, and would use that first.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    program = "import json, test_memory; print(json.dumps(test_memory.filled()))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    found = json.loads(done.stdout)
    assert found["made"] < 2_000_000  # nothing is touched before it is needed
    assert found["frames"] == 2 * 1_480  # 37 whole episodes of 40 observations
    assert found["unique"] < found["grown"] < 1.05 * found["unique"]
    assert found["unique"] < found["said"] < 1.05 * found["unique"]


def test_more_memory_than_there_is_is_refused(monkeypatch):
    cfg = config()
    need = estimate_bytes(SPEC, cfg.replay, SPEC.cameras)
    assert build(cfg, image_keys=("a", "b")).stats()["replay/reserved_bytes"] == pytest.approx(need, rel=0.01)
    monkeypatch.setattr(replay_module, "available_bytes", lambda: need - 1)
    with pytest.raises(ConfigError, match=naming("replay.image_capacity", "replay.capacity", "agent.image_keys")):
        build(cfg, image_keys=("a", "b"))
    build(cfg)  # without images there is room
    assert available_bytes() is None or available_bytes() > 0


def kernel(folder, *, meminfo_kib=None, limit=None, current=0, inactive=0):
    """Files as Linux has them, in two folders."""
    proc, group = folder / "proc", folder / "group"
    proc.mkdir(parents=True)
    group.mkdir()
    if meminfo_kib is not None:
        (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {meminfo_kib} kB\n")
    if limit is not None:
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{current}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file 7\n")
    return proc, group


@pytest.mark.parametrize(("files", "expected"), [
    ({}, None), ({"meminfo_kib": 2, "limit": "max", "current": 3}, 2048),
    ({"meminfo_kib": 2, "limit": 1500, "current": 1000}, 500),
    ({"meminfo_kib": 2, "limit": 1500, "current": 1400, "inactive": 900}, 1000),  # the page cache is given up
    ({"limit": 1500, "current": 1600}, 0),
])  # fmt: skip
def test_available_memory_is_the_least_of_machine_and_control_group(tmp_path, files, expected):
    assert available_bytes(*kernel(tmp_path, **files)) == expected
