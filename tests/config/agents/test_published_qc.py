"""The settings of the published agents, and the documented table of their flags."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
from errors import naming

from serl_chunk.cli.process import load, split_overrides
from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import check_unused, leaves
from serl_chunk.config.presets import configured
from serl_chunk.config.robots import FakeAlohaConfig
from serl_chunk.types import ConfigError

ALGORITHMS = Path(__file__).parents[3] / "docs" / "algorithms.md"
PRESETS = {"": "qc", "both": "qc", "acfql": "qc", "acfql, distilled": "qc-fql", "acrlpd": "qc-rlpd"}
SAME = ("the same", "the same; encoders are ours")


def rows() -> list[tuple[str, str, str, str]]:
    """The table's (published flag, agent, setting here, setting with --compat qc)."""
    section = ALGORITHMS.read_text().partition("## Q-chunking's flags")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [tuple(cell.strip() for cell in line.strip("| ").split("|")) for line in table]  # type: ignore[misc]


def words_of(cell: str) -> list[str]:
    return shlex.split(" ".join(re.findall(r"`(.*?)`", cell)))


def given(preset: str, compat: str | None, words: list[str]) -> tuple[ExperimentConfig, ExperimentConfig]:
    """The experiment of a preset, and with the flags of `words`."""
    before = load("fake_aloha", [], preset=preset, compat=compat)
    if words[:1] == ["--preset"]:
        return before, load("fake_aloha", [], preset=words[1], compat=compat)
    overrides = split_overrides(words)
    after = load("fake_aloha", overrides, preset=preset, compat=compat)
    check_unused(after, [path for path, _ in overrides])
    return before, after


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0].split("=")[0].strip("`"))
def test_each_documented_flag_is_read_and_changes_the_experiment(row):
    _, agent, ours, published = row
    for compat, cell in ((None, ours), ("qc", ours if published in SAME else published)):
        if words := words_of(cell):
            before, after = given(PRESETS[agent], compat, words)
            changed = {leaf.path for leaf in leaves(after)} ^ {leaf.path for leaf in leaves(before)}
            of_before = {leaf.path: leaf.value for leaf in leaves(before)}
            changed |= {leaf.path for leaf in leaves(after) if of_before.get(leaf.path) != leaf.value}
            expected = {path for path, _ in split_overrides(words)} if words[0] != "--preset" else {"preset"}
            assert expected <= changed | {"agent.candidates"}, (cell, changed)  # of one-step policies 1 already


def test_every_setting_of_the_published_agents_is_in_the_table():
    named = {name for row in rows() for name in re.findall(r"agent\.(\w+)=", " ".join(row[2:]))}
    named |= {name for row in rows() for name in re.findall(r"`(\w+)[=`]", row[0])}
    own = {f.name for f in dataclasses.fields(PublishedQcConfig)} - {"language", "use_state", "gripper"}
    assert own <= named


def test_our_settings_are_constants_of_it():
    config = PublishedQcConfig(num_qs=3, q_agg="min", value_hidden_dims=(8,), tau=0.1)
    assert not {"critic", "encoder_lr", "bc_on"} & {f.name for f in dataclasses.fields(config)}
    assert (config.critic.ensemble, config.critic.target_subset, config.critic.target_aggregate) == (3, 3, "min")
    assert (config.critic.hidden, config.critic.tau, config.bounded_critic) == ((8,), 0.1, False)
    assert config.gripper.composition == "continuous"
    assert dataclasses.replace(config, num_qs=4).critic.ensemble == 4
    with pytest.raises(TypeError, match="bc_on"):
        PublishedQcConfig(bc_on="demo")


@pytest.mark.parametrize(
    ("changes", "candidates"),
    [
        ({"actor_type": "best-of-n", "actor_num_samples": 5}, 5),
        ({"actor_type": "distill-ddpg", "actor_num_samples": 5}, 1),
        ({"agent_name": "acrlpd", "actor_type": "best-of-n"}, 1),
    ],
)
def test_candidates_are_of_the_best_of_n_alone(changes, candidates):
    config = PublishedQcConfig(**changes)
    assert config.candidates == candidates


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"agent_name": "iql"}, ("agent.agent_name", "iql", "acfql", "acrlpd")),
        ({"q_agg": "max"}, ("agent.q_agg", "max", "mean", "min")),
        ({"actor_type": "ddpg"}, ("agent.actor_type", "ddpg", "best-of-n", "distill-ddpg")),
        ({"fourier_feature_dim": 5}, ("agent.fourier_feature_dim", 5, "even")),
        ({"num_qs": 0}, ("agent.num_qs", 0, 1)),
        ({"init_temp": 0.0}, ("agent.init_temp", 0.0)),
    ],
)
def test_a_value_that_cannot_work_is_named(changes, named):
    with pytest.raises(ConfigError, match=naming(*named)):
        PublishedQcConfig(**changes)


@pytest.mark.parametrize(
    ("name", "value", "its"),
    [("candidates", "4", "actor_num_samples"), ("critic.ensemble", "4", "num_qs"), ("flow.steps", "4", "flow_steps")],
)
def test_our_name_of_a_setting_leads_to_its(name, value, its):
    with pytest.raises(ConfigError, match=naming(name.partition(".")[0], its)):
        load("fake_aloha", [(f"agent.{name}", value)], preset="qc", compat="qc")


@pytest.mark.parametrize(
    ("preset", "path", "needs"),
    [
        ("qc", "agent.alpha", "agent.actor_type=distill-ddpg"),
        ("qc-fql", "agent.actor_num_samples", "agent.actor_type=best-of-n"),
        ("qc-rlpd", "agent.flow_steps", "agent.agent_name=acfql"),
        ("qc", "agent.bc_alpha", "agent.agent_name=acrlpd"),
        ("qc", "agent.fourier_feature_dim", "agent.use_fourier_features=True"),
    ],
)
def test_a_setting_without_an_effect_is_refused(preset, path, needs):
    config = load("fake_aloha", [(path, "8")], preset=preset, compat="qc")
    with pytest.raises(ConfigError, match=naming(path, needs)):
        check_unused(config, [path])


@pytest.mark.parametrize("agent", [AcfqlConfig(), AcrlpdConfig(), BcConfig()], ids=lambda a: a.kind)
def test_an_experiment_of_it_is_one_with_or_without_the_flag(agent):
    config = configured(ExperimentConfig("x", FakeAlohaConfig(), agent), compat="qc")
    again = dataclasses.replace(config, compat="")
    assert configured(again, compat="qc") == config
    assert configured(again, preset="rlpd-ac").agent.kind == "acrlpd"
