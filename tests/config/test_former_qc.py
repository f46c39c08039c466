"""Settings of runs that `--compat qc` made before it had an agent of its own, as commit 514fce5 wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from errors import naming

from serl_chunk.cli.process import load, spec_of
from serl_chunk.config.former_qc import former_convention
from serl_chunk.config.overrides import to_dict
from serl_chunk.config.renamed import current_config
from serl_chunk.runs.folder import open_run
from serl_chunk.types import ConfigError

FILES = Path(__file__).parents[1] / "data" / "514fce5" / "settings.json"
FORMER: dict[str, dict[str, Any]] = json.loads(FILES.read_text())  # by preset: the agent of `--compat qc`
CONVERTED = [name for name in FORMER if name != "bc"]


def saved(preset: str) -> dict[str, Any]:
    """The `config.json` of 514fce5 of a run of `fake_aloha`."""
    settings = to_dict(load("fake_aloha", [], preset="qc" if preset == "bc" else preset, compat="qc"))
    return json.loads(json.dumps(settings | {"agent": FORMER[preset], "preset": preset}))


@pytest.mark.parametrize("preset", CONVERTED)
def test_the_agent_is_that_of_today(preset):
    now = json.loads(json.dumps(to_dict(load("fake_aloha", [], preset=preset, compat="qc"))))
    current, lines = current_config(saved(preset))
    assert current == now
    assert lines == [f"agent.kind={FORMER[preset]['kind']} of compat=qc is now agent.kind=published_qc"]
    assert not former_convention(current)
    assert current_config(now) == (now, [])


@pytest.mark.parametrize(
    ("preset", "path", "value"),
    [
        ("qc", "update_order", "critic_first"),
        ("qc", "bc_mean", "weights"),
        ("qc", "target_candidates", 8),
        ("qc", "critic.target_average", "new"),
        ("qc", "critic.layer_norm", "before"),
        ("qc", "flow.time", "cosine"),
        ("qc", "flow.noise_low", 0.0),
        ("qc-fql", "normalise_q", True),
        ("qc-fql", "candidates", 4),
        ("qc-rlpd", "log_prob", "mean"),
        ("qc-rlpd", "bc_clip", 1e-6),
        ("qc-rlpd", "critic.target_subset", 2),
        ("qc-rlpd", "gripper.choices", [-1, 1]),
        ("bc", "kind", "bc"),
    ],
)
def test_a_run_that_changed_a_convention_is_refused_with_the_last_commit(tmp_path, preset, path, value):
    old = saved(preset)
    *groups, name = path.split(".")
    group = old["agent"]
    for part in groups:
        group = group[part]
    group[name] = value
    assert current_config(old)[0]["agent"]["kind"] == FORMER[preset]["kind"]
    config = load("fake_aloha", [], preset=preset, compat="qc")
    open_run(config, spec_of(config), str(tmp_path)).lock.close()
    (tmp_path / "config.json").write_text(json.dumps(old))
    with pytest.raises(ConfigError, match=naming("config.json", f"agent.{path}", value, "514fce5", "Resume the run")):
        open_run(config, spec_of(config), str(tmp_path))


def test_what_the_published_code_has_a_setting_for_is_kept():
    old = saved("qc")
    old["agent"]["flow"] |= {"time": "fourier", "fourier_dim": 16, "layer_norm": True}
    old["agent"]["critic"] |= {"layer_norm": "none", "tau": 0.5}
    old["agent"] |= {"lr": 1e-4, "update_order": "together"}  # the name of f1f5725
    agent = current_config(old)[0]["agent"]
    names = ("use_fourier_features", "fourier_feature_dim", "actor_layer_norm", "layer_norm", "tau", "lr")
    assert [agent[name] for name in names] == [True, 16, True, False, 0.5, 1e-4]


def test_a_resume_has_one_line_and_no_change(tmp_path, caplog):
    config = load("fake_aloha", [], preset="qc-rlpd", compat="qc")
    folder = open_run(config, spec_of(config), str(tmp_path))
    folder.write_config()
    folder.lock.close()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"agent": FORMER["qc-rlpd"]}))
    caplog.set_level("INFO")
    again = open_run(config, spec_of(config), str(tmp_path))
    again.lock.close()
    assert again.resumed
    (line,) = caplog.messages
    assert "agent.kind=acrlpd of compat=qc is now agent.kind=published_qc" in line
