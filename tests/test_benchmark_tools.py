"""Tools beside the benchmarks: comparisons of checkouts and runs, planted errors, near misses for classifiers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import mutate_errors
from compare_runs import trained


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
