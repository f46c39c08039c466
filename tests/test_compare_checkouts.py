"""The comparison of two checkouts runs what they hold and judges rates and times in their own direction."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import compare_checkouts
from compare_checkouts import flat, speed_ratio

SCRIPT = """
import json, sys
figures = {figures}
open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps(figures))
"""


def checkout(folder: Path, figures: dict) -> Path:
    """Make a checkout whose only benchmark writes these figures."""
    (folder / "benchmarks").mkdir(parents=True)
    (folder / "benchmarks" / "rates.py").write_text(SCRIPT.format(figures=figures))
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
    return folder


def test_rates_and_times_go_opposite_ways_and_other_figures_nowhere():
    assert speed_ratio("case.steps_per_s", 100.0, 50.0) == 0.5
    assert speed_ratio("case.arrival_s", 2.0, 4.0) == 0.5
    assert speed_ratio("decision_ms", 3.0, 1.5) == 2.0
    assert speed_ratio("outside_share", 0.1, 0.2) is None
    assert speed_ratio("steps_per_s", 0.0, 1.0) is None
    assert dict(flat({"a": {"b": 1, "c": True}, "d": 2.5, "e": "text"})) == {"a.b": 1.0, "d": 2.5}


@pytest.mark.parametrize(("rate", "passes"), [(100.0, True), (96.0, True), (50.0, False)])
def test_a_slower_checkout_fails(tmp_path, rate, passes, monkeypatch, capsys):
    base = checkout(tmp_path / "base", {"steps_per_s": 100.0, "share": 0.5})
    new = checkout(tmp_path / "new", {"steps_per_s": rate, "share": 0.5})
    file = tmp_path / "compare.json"
    words = [str(base), str(new), "--scripts", "rates.py", "--rounds", "2", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["compare_checkouts.py", *words])
    compare_checkouts.main()
    result = json.loads(file.read_text())["rates.py"]
    assert result["ratio"] == pytest.approx(rate / 100)
    assert result["low"] == result["high"] == pytest.approx(rate / 100)
    assert result["figures"] == {"steps_per_s": pytest.approx(rate / 100)}
    assert result["passes"] is passes
    assert ("FAILS" in capsys.readouterr().out) is not passes


def test_a_script_that_fails_ends_it_with_its_output(tmp_path):
    base = checkout(tmp_path / "base", {"steps_per_s": 1.0})
    (base / "benchmarks" / "rates.py").write_text("raise SystemExit('no such robot')")
    with pytest.raises(SystemExit, match="no such robot"):
        compare_checkouts.measure(base, "rates.py")
