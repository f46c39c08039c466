"""Recorded numbers of the published Q-chunking code, by the benchmark that compares any folder of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "data" / "qc"
FILES = sorted(CASES.glob("*.npz"))
OFTEN = ("acfql_best_of_n", "acfql_ddpg", "acrlpd_min")  # the others are variants of these


@pytest.fixture(scope="module")
def parity() -> Iterator[ModuleType]:
    """The benchmark as a module."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import parity_qc

    yield parity_qc
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize(
    "file",
    [f for f in FILES if f.stem in OFTEN]
    + [pytest.param(f, marks=pytest.mark.slow) for f in FILES if f.stem not in OFTEN],
    ids=lambda f: f.stem,
)
def test_every_recorded_number_is_ours(parity, file):
    comparison = parity.Comparison(parity.Case(file))
    comparison.run()
    assert {c.group for c in comparison.compared} == {
        "batch", "loss", "grad_norm", "mid", "after1", "after1_info", "sample"
    }  # fmt: skip
    assert {c.name: c.error for c in comparison.compared if c.error > 2e-5} == {}
    unused = {k for k in comparison.left_out if "actor_onestep_flow" in k and comparison.case.best_of_n}
    assert set(comparison.left_out) - unused == {"batch/terminals", "batch/next_actions"}


def test_a_difference_is_an_error(parity):
    assert parity.relative_error(np.array([1.0, 100.0]), np.array([1.0, 101.0])) == pytest.approx(1 / 101)
    assert parity.relative_error(np.zeros(3), np.zeros(3)) == 0
    assert parity.relative_error(np.full(3, 1e-9), np.zeros(3)) > 1
    assert parity.relative_error(np.zeros((3, 1)), np.zeros(3)) == np.inf
    assert parity.relative_error(np.array([np.nan]), np.zeros(1)) == np.inf


def copied(folder: Path, **changes: np.ndarray) -> Path:
    """The smallest case of acfql with some arrays changed or added."""
    file = min(CASES.glob("acfql_*.npz"), key=lambda f: f.stat().st_size)
    with np.load(file) as data:
        np.savez(folder / file.name, **({k: data[k] for k in data} | changes))
    (folder / file.name).with_suffix(".json").write_text(file.with_suffix(".json").read_text())
    return folder


def status(parity: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    monkeypatch.setattr(sys, "argv", ["parity_qc.py", str(folder)])
    return parity.main()


@pytest.mark.slow
def test_the_table_names_what_is_too_large_and_what_is_unknown(parity, monkeypatch, tmp_path, capsys):
    changed = {"loss/critic/critic_loss": np.float32(0.5), "mid/unheard_of": np.zeros(2)}
    assert status(parity, monkeypatch, copied(tmp_path, **changed)) == 1
    said = capsys.readouterr().out
    assert "loss/critic/critic_loss  TOO LARGE" in said
    assert "not compared: mid/unheard_of (not known here)" in said
    assert "NOT all of 1 cases within 2e-05" in said


def test_what_cannot_be_compared_is_no_agreement(parity, monkeypatch, tmp_path, capsys):
    """Without a draw no loss can be made; whatever was recorded of them then counts against it."""
    file = next(copied(tmp_path).glob("*.npz"))
    with np.load(file) as data:
        arrays = {k: data[k] for k in data}
    for group in ("noise", "noise_update"):  # of the loss, and of the update after it
        arrays[f"{group}/x_0"] = arrays.pop(f"{group}/x0")
    np.savez(file, **arrays)
    for unread in ("_update", "_action"):
        monkeypatch.setattr(parity.Comparison, unread, lambda self, state, batch=None: None)
    assert status(parity, monkeypatch, tmp_path) == 1
    said = capsys.readouterr().out
    assert "NOT COMPARED, and must be: loss/*, grad_norm/*" in said
    assert "no noise/x0" in said


def test_what_is_no_case_is_said(parity, monkeypatch, tmp_path, capsys):
    assert status(parity, monkeypatch, tmp_path) == 1
    assert "no case (NAME.npz beside NAME.json) in it" in capsys.readouterr().err
    file = next(copied(tmp_path).glob("*.json"))
    meta = json.loads(file.read_text())
    file.write_text(json.dumps({**meta, "agent": "iql"}))
    assert status(parity, monkeypatch, tmp_path) == 1
    assert "cannot be run: DataError" in (said := capsys.readouterr().out)
    assert "agent 'iql'; this compares acfql and acrlpd" in said
    file.unlink()
    assert status(parity, monkeypatch, tmp_path) == 1
    assert f"{file.name} is missing" in capsys.readouterr().out
