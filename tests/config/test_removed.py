"""Removed settings are refused where one is set, and ignored in a run folder that did not use them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from errors import naming

from serl_chunk.cli.process import load, spec_of
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.removed import CONVENTIONS, FIRST_SET, REMOVED, REMOVED_VALUES, still_acting
from serl_chunk.config.renamed import REMOVED_NAMES, current_config
from serl_chunk.runs.folder import open_run, read_config
from serl_chunk.types import ConfigError

CONFIG, GAUSSIAN = load("fake_aloha", []), load("fake_aloha", [], preset="qc-rlpd")
CLONE, DISTILLED = load("fake_aloha", [], preset="bc"), load("fake_aloha", [], preset="qc-fql")
PRESETS = {id(GAUSSIAN): "qc-rlpd", id(DISTILLED): "qc-fql"}
SPEC = spec_of(CONFIG)
IMPROVE = {"steps": 0, "top": 4, "rate": 0.02, "radius": 0.1, "imitate": 0.0, "candidates": 8}
# Each removed setting: an experiment that had it, the value that changed nothing, and one that did.
VALUES: dict[str, tuple[ExperimentConfig, Any, Any]] = {
    "agent.improve": (CONFIG, IMPROVE, IMPROVE | {"steps": 2}),
    "agent.exploration_knots": (CONFIG, 0, 2),
    "agent.choose_std": (CONFIG, 0.0, 0.5),
    "agent.choose_by": (CONFIG, "mean", "min"),
    "agent.critic.tail": (CONFIG, "repeat", "policy"),
    "agent.target_candidates": (GAUSSIAN, 1, 4),
    "reward.intervention_penalty": (CONFIG, 0.0, 0.1),
    "replay.intervention_windows": (CONFIG, "keep", "cut"),
    "agent.update_order": (CONFIG, "critic_first", "joint"),
    "agent.bc_mean": (CONFIG, "weights", "batch"),
    "agent.bc_invalid": (GAUSSIAN, False, True),
    "agent.bc_clip": (GAUSSIAN, 1e-6, 1e-5),
    "agent.kernel_init": (CONFIG, "lecun_normal", "xavier_uniform"),
    "agent.normalise_q": (DISTILLED, False, True),
    "agent.critic.target_average": (CONFIG, "new", "old"),
    "agent.flow.activation": (CONFIG, "relu", "gelu"),
    "agent.flow.time": (CONFIG, "cosine", "raw"),
    "agent.flow.noise_high": (CONFIG, 1.0, 0.5),
    "agent.critic.sigma_bins": (load("fake_aloha", [("agent.critic.loss", "hl_gauss")]), 0.75, 1.0),
    "agent.critic.initial_logit": (CONFIG, -2.0, -1.0),
}


@pytest.fixture(autouse=True)
def search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a copy of sys.path: an experiment's folder is added to it."""
    monkeypatch.setattr(sys, "path", list(sys.path))


EACH = pytest.mark.parametrize("path", VALUES)


def folder_with(run: Path, config: ExperimentConfig, path: str, value: Any) -> dict[str, Any]:
    """Write the folder of a run whose `config.json` has the setting `path`; return that file's content."""
    opened = open_run(config, SPEC, str(run))
    opened.write_config()
    opened.lock.close()
    file = run / "config.json"
    saved = json.loads(file.read_text())
    *groups, name = path.split(".")
    parent = saved
    for group in groups:
        parent = parent[group]
    parent[name] = value
    file.write_text(json.dumps(saved))
    return saved


def resume(run: Path, config: ExperimentConfig) -> None:
    opened = open_run(config, SPEC, str(run))
    assert opened.resumed
    opened.lock.close()


def test_each_entry_is_tested():
    assert set(VALUES) == set(REMOVED)


@EACH
def test_the_command_line_refuses_one_and_says_why(path):
    _, _, used = VALUES[path]
    preset = PRESETS.get(id(VALUES[path][0]))
    field = f"{path}.steps" if isinstance(used, dict) else path
    with pytest.raises(
        ConfigError, match=naming(path, "removed", REMOVED[path].why[:-1], REMOVED[path].last, "Leave it out")
    ):
        load("fake_aloha", [(field, "2")], preset=preset)


def test_what_one_agent_lost_is_a_setting_of_another_still():
    assert load("fake_aloha", [("agent.target", "policy"), ("agent.target_candidates", "4")]).agent.target == "policy"
    with pytest.raises(ConfigError, match=naming("BcConfig", "target_candidates")) as refused:
        load("fake_aloha", [("agent.target_candidates", "4")], preset="bc")
    assert FIRST_SET not in str(refused.value)
    kernel = [("agent.kernel_init", "lecun_normal")]
    assert load("fake_aloha", kernel, preset="rlpd").agent.kernel_init == "lecun_normal"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("from serl_chunk import AcfqlConfig\nAcfqlConfig(choose_std=1.0)", "agent.choose_std"),
        ("from serl_chunk import CriticConfig\nCriticConfig(tail='policy')", "agent.critic.tail"),
        ("from serl_chunk import AcrlpdConfig\nAcrlpdConfig(target_candidates=4)", "agent.target_candidates"),
        ("from serl_chunk import RewardConfig\nRewardConfig(intervention_penalty=0.1)", "reward.intervention_penalty"),
        (
            "from serl_chunk import ReplayConfig\nReplayConfig(intervention_windows='cut')",
            "replay.intervention_windows",
        ),
        ("from serl_chunk import BcConfig\nBcConfig(update_order='joint')", "agent.update_order"),
        ("from serl_chunk import BcConfig\nBcConfig(kernel_init='xavier_uniform')", "agent.kernel_init"),
        ("from serl_chunk import AcfqlConfig\nAcfqlConfig(normalise_q=True)", "agent.normalise_q"),
        ("from serl_chunk import AcrlpdConfig\nAcrlpdConfig(bc_clip=1e-5)", "agent.bc_clip"),
        ("from serl_chunk import CriticConfig\nCriticConfig(target_average='old')", "agent.critic.target_average"),
        ("from serl_chunk import FlowConfig\nFlowConfig(time='raw')", "agent.flow.time"),
        ("from serl_chunk import FlowConfig\nFlowConfig(activation='gelu')", "agent.flow.activation"),
        ("from serl_chunk import ImproveConfig", "agent.improve"),
        ("import serl_chunk\nserl_chunk.ImproveConfig()", "agent.improve"),
        ("from serl_chunk.config.agents import ImproveConfig", "agent.improve"),
        ("from serl_chunk.config.improvement import ImproveConfig", "agent.improve"),
    ],
)
def test_an_experiment_that_sets_one_is_refused_with_its_line(tmp_path, text, path):
    file = tmp_path / "mine.py"
    file.write_text(text + "\n")
    line = f"mine.py:{len(text.splitlines())}"
    with pytest.raises(ConfigError, match=naming(line, path, REMOVED[path].why[:-1], REMOVED[path].last)):
        load_experiment(str(file))


@pytest.mark.parametrize(
    ("name", "field"), [("BcConfig", "target_candidates"), ("LearnerConfig", "time"), ("EncoderConfig", "activation")]
)
def test_a_misspelt_field_of_another_class_is_not_taken_for_a_removed_one(tmp_path, name, field):
    file = tmp_path / "mine.py"
    file.write_text(f"from serl_chunk import {name}\n{name}({field}=4)\n")
    with pytest.raises(ConfigError, match=naming("mine.py", field)) as refused:
        load_experiment(str(file))
    assert "last commit" not in str(refused.value)


def test_every_removed_name_leads_to_a_removed_setting():
    assert set(REMOVED_NAMES.values()) <= set(REMOVED)


@EACH
def test_a_run_that_did_not_use_it_resumes_as_if_it_were_not_there(tmp_path, caplog, path):
    config, unused, _ = VALUES[path]
    saved = folder_with(tmp_path, config, path, unused)
    assert not still_acting(current_config(saved)[0])
    caplog.set_level("INFO")
    resume(tmp_path, config)
    assert caplog.messages == []
    group: Any = read_config(tmp_path)
    *groups, name = path.split(".")
    for part in groups:
        group = group[part]
    assert name not in group


@EACH
def test_a_run_that_used_it_is_refused_with_the_last_commit(tmp_path, path):
    config, _, used = VALUES[path]
    saved = folder_with(tmp_path, config, path, used)
    with pytest.raises(ConfigError, match=naming("config.json", path, REMOVED[path].last, "Resume the run")):
        open_run(config, SPEC, str(tmp_path))
    assert still_acting(current_config(saved)[0]) == ([path] if REMOVED[path].acts else [])


@pytest.mark.parametrize(("path", "value"), REMOVED_VALUES)
def test_a_run_that_used_a_removed_value_is_refused_with_the_last_commit(tmp_path, path, value):
    folder_with(tmp_path, GAUSSIAN, path, value)
    with pytest.raises(ConfigError, match=naming("config.json", path, value, CONVENTIONS, "Resume the run")):
        open_run(GAUSSIAN, SPEC, str(tmp_path))


def test_a_removed_value_of_a_critic_that_a_clone_does_not_have_changes_nothing(tmp_path):
    folder_with(tmp_path, CLONE, "agent.critic.layer_norm", "after")
    resume(tmp_path, CLONE)


@pytest.mark.parametrize("path", ["agent.flow.time", "agent.flow.activation"])
def test_a_gaussian_clone_has_no_flow(tmp_path, path):
    clone = load("fake_aloha", [], preset="bc-gaussian")
    folder_with(tmp_path, clone, path, VALUES[path][2])
    resume(tmp_path, clone)


def test_the_best_of_n_had_no_q_term_to_normalise(tmp_path):
    folder_with(tmp_path, CONFIG, "agent.normalise_q", True)
    resume(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"candidates": 1, "target": "expectile"}, False),  # one is compared with nothing
        ({"candidates": 1, "target": "policy"}, True),
        ({"candidates": 1, "target": "policy", "target_candidates": 1}, False),
        ({"candidates": 4, "target": "expectile"}, True),
    ],
)
def test_the_comparison_counts_only_where_candidates_are_compared(changes, refused):
    saved = {"agent": {"kind": "acfql", "choose_by": "min", "target_candidates": 8,
                       "critic": {"target_aggregate": "mean"}, **changes}}  # fmt: skip
    assert ("choose_by" in current_config(saved)[0]["agent"]) is refused


def test_a_clone_compared_nothing(tmp_path):
    folder_with(tmp_path, CLONE, "agent.choose_by", "min")
    resume(tmp_path, CLONE)
