"""What the calibration plot says: bins, intervals that count episodes, and the range of a bounded critic."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from serl_chunk.config.agents.acfql import AcfqlConfig, DecoupledConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.experiment import ChunkConfig, ExperimentConfig, RewardConfig
from serl_chunk.config.outcome import OutcomeConfig
from serl_chunk.config.overrides import to_dict
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.runs.metrics import RunMetrics
from serl_chunk.runs.report.panels import binned, calibration_panel, decisions, value_range

RNG = np.random.default_rng


def rows(count, *, bias=0.0, per_episode=6, seed=0, **changes):
    """Episodes that succeed with the chance that their value says, less `bias`; one fate for all their decisions."""
    rng = RNG(seed)
    out = []
    for _ in range(count):
        q = rng.uniform(0.1, 0.9)
        g = float(rng.uniform() < q - bias)
        out.append({"q": [q] * per_episode, "g": [g] * per_episode, "env_steps": 1, "wall": 1.0, **changes})
    return out


def test_an_interval_by_hand():
    found = decisions([{"q": [0.5, None], "g": [1.0, 0.0]}, {"q": [0.2, 0.4], "g": [None, 0.5]}])  # both are needed
    assert [c.tolist() for c in (found.value, found.realised, found.episode)] == [[0.5, 0.4], [1.0, 0.5], [0, 1]]
    assert found.bias == pytest.approx(-0.3)
    same = [{"q": [0.5, 0.5], "g": [g, g]} for g in (0.0, 1.0, 1.0, 1.0, 0.0)]
    (found,) = binned(decisions(same), 1)
    assert (found.value, found.realised) == (0.5, 0.6)
    # five independent numbers, however often each is said: 1.96 * s / sqrt(5), s the sample deviation
    assert found.half == pytest.approx(1.96 * np.std([0, 1, 1, 1, 0], ddof=1) / np.sqrt(5))
    (few,) = binned(decisions(same[:4]), 1)
    assert np.isnan(few.half)


def test_intervals_cover_equality_where_the_critic_is_calibrated_and_miss_it_where_it_is_not():
    covered = {}
    for bias in (0.0, 0.3):
        bins = [b for seed in range(40) for b in binned(decisions(rows(200, bias=bias, seed=seed)), 4)]
        covered[bias] = np.mean([abs(b.realised - b.value) <= b.half for b in bins])
    assert covered[0.0] > 0.85  # of 95 %; in bins of fifty episodes the normal interval is a little short
    assert covered[0.3] < 0.2


@pytest.mark.parametrize(
    ("agent", "values", "expected"),
    [
        (AcfqlConfig(), {}, (0.0, 1.0)),
        (DecoupledConfig(), {"reward": RewardConfig(scale=2.0, offset=-1.0, failure_reward=-100.0),
                             "chunk": ChunkConfig(critic_horizon=10, return_steps=10)}, (-100.0, 1.0)),
        (AcfqlConfig(), {"outcome": OutcomeConfig(classifier="c", stages=("a>b>c",), stage_reward=0.25)}, (0.0, 1.5)),
        (AcrlpdConfig(), {}, None),
    ],
)  # fmt: skip
def test_the_range_follows_from_the_runs_configuration(agent, values, expected):
    config = ExperimentConfig("x", FakeAlohaConfig(), agent, discount=0.99, **values)
    found = value_range(to_dict(config))
    assert found == (expected if expected is None else pytest.approx(expected))
    assert config.value_range == found
    assert value_range({}) is None


def test_the_panel_shows_bins_equality_and_the_range():
    metrics = RunMetrics({"episode": rows(100) + rows(20, seed=1, intervention_count=1), "train": [], "eval": []})
    ax = Figure().subplots()
    assert calibration_panel((-100.0, 0.0))(ax, metrics)
    found = {curve.get_label(): curve for curve in ax.lines}
    assert found["range of the critic"].get_xdata() == [-100.0, -100.0]
    assert found["equal: calibrated"].get_xdata()[0] == -100.0
    (bars,) = ax.containers
    assert len(bars.lines[0].get_xdata()) == 10
    truncated = [{"q": [0.5], "g": [None], "env_steps": 1, "wall": 1.0}] * 50
    again = Figure().subplots()
    longer = RunMetrics({"episode": metrics["episode"] + truncated, "train": [], "eval": []})
    assert calibration_panel((-100.0, 0.0))(again, longer)
    assert again.get_title() == ax.get_title()  # the newest hundred whose returns are known
    assert not calibration_panel(None)(Figure().subplots(), RunMetrics({"episode": truncated}))
    last = decisions(metrics["episode"][-100:-20])  # of the newest hundred, those without intervention
    assert f"{last.bias:+.3g}" in ax.get_title()
    assert not calibration_panel(None)(Figure().subplots(), RunMetrics({"episode": []}))
