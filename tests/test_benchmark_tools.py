"""Tools beside the benchmarks: comparisons of checkouts and runs, planted errors, near misses for classifiers."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import classifier_fake_aloha as near_misses
import compare_checkouts
import mutate_errors
from compare_runs import recorded, trained

SCRIPT = """
import json, sys
open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps({figures}))
"""


def checkout(folder: Path, script: str) -> Path:
    """Make a checkout whose only benchmark is `script`."""
    for name in ("benchmarks", ".venv/bin"):
        (folder / name).mkdir(parents=True)
    (folder / "benchmarks" / "rates.py").write_text(script)
    (folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
    return folder


@pytest.mark.parametrize(("name", "base", "new", "ratio"), [
    ("case.steps_per_s", 100.0, 50.0, 0.5), ("case.arrival_s", 2.0, 4.0, 0.5), ("decision_ms", 3.0, 1.5, 2.0),
    ("outside_share", 0.1, 0.2, None), ("steps_per_s", 0.0, 1.0, None),
])  # fmt: skip
def test_rates_and_times_go_opposite_ways_and_other_figures_nowhere(name, base, new, ratio):
    assert compare_checkouts.speed_ratio(name, base, new) == ratio


@pytest.mark.parametrize(("rate", "passes"), [(96.0, True), (50.0, False)])
def test_a_slower_checkout_fails(tmp_path, rate, passes, monkeypatch, capsys):
    names = {"base": 100.0, "new": rate}
    made = [checkout(tmp_path / n, SCRIPT.format(figures={"steps_per_s": v, "share": 0.5})) for n, v in names.items()]
    file = tmp_path / "compare.json"
    words = [*map(str, made), "--scripts", "rates.py", "--rounds", "2", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["compare_checkouts.py", *words])
    compare_checkouts.main()
    result, of_100 = json.loads(file.read_text())["rates.py"], pytest.approx(rate / 100)
    assert (result["ratio"], result["low"], result["high"], result["passes"]) == (of_100, of_100, of_100, passes)
    assert result["figures"] == {"steps_per_s": of_100}
    assert ("FAILS" in capsys.readouterr().out) is not passes


def test_a_script_that_fails_ends_a_comparison_with_its_output(tmp_path):
    with pytest.raises(SystemExit, match="no such robot"):
        compare_checkouts.measure(checkout(tmp_path / "base", "raise SystemExit('no such robot')"), "rates.py")


def write_run(folder: Path, *, checksum: int = 1, loss: float = 0.5, wall: float = 1.0, success: bool = True) -> None:
    meta = folder / "checkpoints" / "50" / "meta"
    meta.mkdir(parents=True)
    (meta / "metadata").write_text(json.dumps({"content": {"updates": 50, "checksums": {"kernel": checksum}}}))
    row = {"kind": "train", "step": 50, "wall": wall, "critic/critic_loss": loss}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "evaluations").mkdir()
    (folder / "evaluations" / f"checkpoint_{wall}.json").write_text(json.dumps({"episodes": [{"success": success}]}))


@pytest.mark.parametrize(("changed", "name"), [
    ({"checksum": 2}, "checkpoint 50.checksums.kernel"), ({"loss": 0.25}, "row 0.critic/critic_loss"),
    ({"success": False}, "evaluation of checkpoint, episode 0.success"),
])  # fmt: skip
def test_a_changed_value_of_a_run_is_named_and_no_time_is(tmp_path, changed, name):
    write_run(tmp_path / "base")
    write_run(tmp_path / "new", wall=2.0, **changed)
    base, new = dict(trained(tmp_path / "base")), dict(trained(tmp_path / "new"))
    assert base.keys() == new.keys()
    assert [key for key in base if base[key] != new[key]] == [name]


def test_a_changed_bit_and_a_changed_attribute_of_an_episode_are_named(tmp_path):
    def write(folder: Path, value: float, success: bool) -> dict[str, str]:
        folder.mkdir()
        with h5py.File(folder / "episode_0.hdf5", "w") as file:
            file.attrs["success"] = success
            file["rl/action"] = np.array([0.0, value], np.float32)
        return dict(recorded(folder))

    base, new = write(tmp_path / "base", 1.0, True), write(tmp_path / "new", np.nextafter(np.float32(1), 2), False)
    assert [key for key in base if base[key] != new[key]] == ["episode_0.hdf5/@success", "episode_0.hdf5/rl/action"]


SOURCE = """
class SerlChunkError(Exception): ...
class DataError(SerlChunkError, ValueError): ...
class Other(Exception): ...
def read(path):
    if not path:
        raise ValueError("ä path is needed", 1)
    try:
        raise DataError(
            f"{path}: is empty, "
            f"give {path!r} another"
        ) from None
    except KeyError:
        raise Other("not ours")
class Reader:
    def close(self):
        raise DataError("closed twice")
    def open(self, name):
        raise DataError(name)
"""


def test_errors_with_a_text_are_replaced_and_found_again_where_they_were_moved(tmp_path):
    (tmp_path / "serl_chunk").mkdir()
    file = tmp_path / "serl_chunk" / "reading.py"
    file.write_text(SOURCE)
    found = mutate_errors.raises(tmp_path)
    assert [(r.function, r.index, r.error) for r in found] == [
        ("read", 0, "ValueError"), ("read", 1, "DataError"), ("Reader.close", 0, "DataError"),
    ]  # fmt: skip
    names: dict = {}
    exec(mutate_errors.mutated(SOURCE, dict(enumerate(found))), names)
    with pytest.raises(ValueError, match=r"\('MUTANT 0 message', 1\)"):
        names["read"]("")
    with pytest.raises(names["DataError"], match=r"\AMUTANT 1 message\Z"):
        names["read"]("a")
    saved = [r.to_json() for r in found]
    file.rename(file.with_name("moved.py")).write_text(SOURCE.replace("path:", "file:").replace("twice", "again"))
    first, second, third = mutate_errors.located(saved, mutate_errors.raises(tmp_path))
    assert (first.index, second.index, second.file.stem, third) == (0, 1, "moved", None)
    file.write_text(SOURCE + "\ndef close():\n    raise DataError('closed twice')\n")  # told apart by its function
    file.with_name("moved.py").unlink()
    there = mutate_errors.raises(tmp_path)
    assert mutate_errors.located([r.to_json() for r in there], there) == there


@pytest.mark.parametrize("kind", ["success", "next_to", "held", "occluded", "empty"])
def test_an_episode_ends_as_its_kind_does(kind, monkeypatch):
    envs, make, task = [], near_misses.FakeAlohaEnv, near_misses.task
    monkeypatch.setattr(near_misses, "FakeAlohaEnv", lambda *args: envs.append(make(*args)) or envs[-1])
    episode = next(e for e in (near_misses.record(kind, seed) for seed in range(10)) if e is not None)
    env, labels = envs[-1], episode.labels
    away = math.dist(env.cube[:2], task.PLACE[:2])
    assert (env.holder == near_misses.LEFT) == (kind == "held")
    assert away < 0.05 if kind in ("success", "held") else away > 0.06
    first = int(np.argmax(labels)) if labels.any() else len(labels)
    assert labels[first:].all()
    assert (len(labels) - first >= 8) == (kind == "success")
    assert set(episode.images) == set(task.CAMERAS)
    above = math.dist(env.grips[near_misses.LEFT][:2], task.PLACE[:2])
    assert above < 0.03 or kind not in ("occluded", "empty")
