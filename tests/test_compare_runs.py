"""`benchmarks/compare_runs.py` notices a changed bit, and no times."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from compare_runs import recorded, trained


def write_run(folder: Path, *, checksum: int = 1, loss: float = 0.5, wall: float = 1.0, success: bool = True) -> None:
    meta = folder / "checkpoints" / "50" / "meta"
    meta.mkdir(parents=True)
    (meta / "metadata").write_text(json.dumps({"content": {"updates": 50, "checksums": {"kernel": checksum}}}))
    row = {"kind": "train", "step": 50, "wall": wall, "critic/critic_loss": loss}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "evaluations").mkdir()
    (folder / "evaluations" / f"checkpoint_{wall}.json").write_text(json.dumps({"episodes": [{"success": success}]}))


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"checksum": 2}, "checkpoint 50.checksums.kernel"),
        ({"loss": 0.25}, "row 0.critic/critic_loss"),
        ({"success": False}, "evaluation of checkpoint, episode 0.success"),
    ],
)
def test_a_changed_value_of_a_run_is_named(tmp_path: Path, changed: dict, name: str):
    write_run(tmp_path / "base")
    write_run(tmp_path / "new", wall=2.0, **changed)
    base, new = dict(trained(tmp_path / "base")), dict(trained(tmp_path / "new"))
    assert base.keys() == new.keys()
    assert [key for key in base if base[key] != new[key]] == [name]


def test_a_changed_bit_and_a_changed_attribute_of_an_episode_are_named(tmp_path: Path):
    def write(folder: Path, value: float, success: bool) -> dict[str, str]:
        folder.mkdir()
        with h5py.File(folder / "episode_0.hdf5", "w") as file:
            file.attrs["success"] = success
            file["rl/action"] = np.array([0.0, value], np.float32)
        return dict(recorded(folder))

    base, new = write(tmp_path / "base", 1.0, True), write(tmp_path / "new", np.nextafter(np.float32(1), 2), False)
    assert [key for key in base if base[key] != new[key]] == ["episode_0.hdf5/@success", "episode_0.hdf5/rl/action"]
