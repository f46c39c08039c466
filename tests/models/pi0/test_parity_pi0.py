"""Recorded numbers of openpi, by the benchmark that compares any folder of them."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pi0_models import Case, parity_pi0, record_pi0

from serl_chunk.models.pi0.tree import nested
from serl_chunk.runs.openpi_checkpoints import export

RECORDED = Path(__file__).resolve().parents[2] / "data" / "pi0_tiny_f32"


@pytest.fixture(scope="module")
def rows() -> list[parity_pi0.Row]:
    comparison = parity_pi0.compare(RECORDED)
    assert isinstance(comparison, parity_pi0.Comparison), comparison
    return comparison.rows


def test_every_recorded_number_is_ours(rows):
    assert {row.name: row for row in rows if not row.good} == {}
    names = {row.name for row in rows}
    with np.load(RECORDED / "outputs.npz") as recorded:
        assert set(recorded.files) <= names
    assert sum(name.startswith("grad_norm/") for name in names) == 50


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pi05", "lora", "bfloat16"])
def test_other_sizes_that_openpi_computed_are_ours_too(name):
    """Recorded by `benchmarks/record_openpi.py`."""
    comparison = parity_pi0.compare(RECORDED.parent / "pi0_openpi" / name)
    assert isinstance(comparison, parity_pi0.Comparison), comparison
    assert {row.name: row for row in comparison.rows if not row.good} == {}
    assert len(comparison.rows) > 70


def test_a_verdict_depends_on_what_is_compared():
    def verdict(name: str, ours: Any, recorded: Any, exact: bool = True, **options: Any) -> bool:
        return parity_pi0.compared(name, np.asarray(ours), np.asarray(recorded), exact=exact, **options).good

    large = np.array([100.0, 0.0])
    assert verdict("v_t", large + 1.9e-5, large)
    assert not verdict("v_t", large + 2.1e-5, large)
    assert verdict("kv_cache/k", large + 9e-4, large)
    assert not verdict("kv_cache/k", large + 1.1e-3, large)
    assert not verdict("kv_cache/v", large / 100 + 2.1e-5, large / 100)
    assert verdict("v_t", large + 2.9, large, exact=False)
    assert not verdict("v_t", large + 3.1, large, exact=False)
    assert verdict("grad/x", large * (1 + 9e-5), large)
    assert not verdict("grad/x", large * (1 + 1.1e-4), large)
    assert not verdict("grad_norm/x", 1e-12, 0.0)
    assert verdict("grad_norm/x", 1e-9, 3e-9, tolerance=1e-6)
    assert not verdict("prefix_mask", [True, True], [True, False])
    assert not verdict("v_t", np.zeros((2, 1)), np.zeros(2))
    assert not verdict("v_t", [np.nan], [0.0])


def recorded_copy(folder: Path, **changed: np.ndarray) -> Path:
    copy = folder / "case"
    shutil.copytree(RECORDED, copy)
    with np.load(RECORDED / "outputs.npz") as outputs:
        kept = {k: outputs[k] for k in ("prefix_mask", "posemb", "v_t")}
    np.savez(copy / "outputs.npz", **{**kept, **changed})
    return copy


def status(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> int:
    monkeypatch.setattr(sys, "argv", ["parity_pi0.py", *map(str, folders)])
    return parity_pi0.main()


@pytest.mark.slow
@pytest.mark.parametrize(("changed", "shown"), [
    ({}, "all agree"), ({"unheard_of": np.zeros(2)}, "NOT COMPARED"),
    ({"posemb": np.zeros((2, 32), np.float32)}, "DIFFERS"),
    ({"siglip/base_0_rgb": np.zeros((2, 9, 64), np.float32)}, "recorded (2, 9, 64)"),
])  # fmt: skip
def test_a_difference_and_an_array_that_is_not_compared_end_with_status_one(
    changed, shown, monkeypatch, tmp_path, capsys
):
    assert status(monkeypatch, recorded_copy(tmp_path, **changed)) == (1 if changed else 0)
    assert shown in capsys.readouterr().out


def test_what_is_no_case_is_refused(monkeypatch, tmp_path, capsys):
    assert status(monkeypatch, tmp_path) == 1
    assert f"{tmp_path / 'meta.json'}: no such file" in capsys.readouterr().out


def test_checkpoints_of_a_case_are_found_and_compared(tmp_path):
    folder = recorded_copy(tmp_path)
    case = Case(folder)
    params = {k: v.copy() for k, v in case.params().items()}
    export(folder / "release_ckpt", case.config, nested(params), {})
    params["state_proj/bias"][0] += 1
    export(folder / "train_ckpt" / "0", case.config, nested(params), {})
    comparison = parity_pi0.Comparison(Case(folder))
    comparison._parameters(comparison.case.params())
    verdicts = {row.name: row.verdict for row in comparison.rows}
    assert verdicts["checkpoint release_ckpt/params"] == "ok"
    assert verdicts["checkpoint train_ckpt/0/params"].startswith("DIFFERS: state_proj/bias")
    assert verdicts["params.txt (50 parameters)"] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in record_pi0.CHANGES if name not in record_pi0.LARGE])
def test_cases_of_other_sizes_agree_with_the_plain_implementation(name, tmp_path):
    record_pi0.record(name, tmp_path / name)
    comparison = parity_pi0.compare(tmp_path / name)
    assert isinstance(comparison, parity_pi0.Comparison), comparison
    assert {row.name: row for row in comparison.rows if not row.good} == {}
    meta = json.loads((tmp_path / name / "meta.json").read_text())
    assert meta["case"] == name
