"""The cost of a decision: the published figures of the FLOP model, and what XLA counts of our program."""

from __future__ import annotations

import dataclasses

import pytest
from pi0_models import pi0_best_of_n

from serl_chunk.config.agents.pi0 import PI0_PRESETS
from serl_chunk.types import DataError

FULL = PI0_PRESETS["pi0"]


def test_the_model_has_the_published_figures():
    assert pi0_best_of_n.prefix_flops(FULL) == pytest.approx(3.99e12, rel=0.005)
    assert pi0_best_of_n.step_flops(FULL) == pytest.approx(38.6e9, rel=0.005)
    assert pi0_best_of_n.shared_flops(FULL, 1) == pytest.approx(4.38e12, rel=0.005)
    assert pi0_best_of_n.shared_flops(FULL, 8) == pytest.approx(7.1e12, rel=0.01)
    assert pi0_best_of_n.shared_flops(FULL, 32) == pytest.approx(16.3e12, rel=0.01)


def test_a_program_of_the_released_sizes_computes_what_the_model_says(monkeypatch):
    monkeypatch.setattr(pi0_best_of_n, "CANDIDATES", (1, 32))
    monkeypatch.setattr(pi0_best_of_n, "STEPS", 2)
    for figures in pi0_best_of_n.count_full().values():
        assert figures["lowered_flops"] == pytest.approx(figures["model_flops"], rel=0.02)


@pytest.mark.slow
def test_the_table_compares_shared_and_independent_samples(monkeypatch, capsys):
    monkeypatch.setattr(pi0_best_of_n, "CANDIDATES", (1, 3))
    monkeypatch.setattr(pi0_best_of_n, "STEPS", 2)
    config = dataclasses.replace(pi0_best_of_n.divided(8, 9), image_size=(56, 56))
    figures = pi0_best_of_n.measure(config, 1)
    assert set(figures) == {"1", "3"}
    assert all(f["difference"] < 1e-4 for f in figures.values())
    pi0_best_of_n.report(figures)
    assert "choose a smaller --width" in capsys.readouterr().out.lower()


def test_sizes_that_divide_nothing_are_refused():
    with pytest.raises(DataError, match="--width 3, --depth 1"):
        pi0_best_of_n.divided(3, 1)
    assert pi0_best_of_n.divided(4, 3).vlm.width == FULL.vlm.width // 4
