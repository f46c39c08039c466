"""The settings of the published agents, and the documented table of their flags."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from serl_chunk.cli.process import load, split_overrides
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import check_unused, leaves

NAMES = Path(__file__).parents[2] / "docs" / "algorithms" / "published_names.md"
PRESETS = {"": "qc", "both": "qc", "acfql": "qc", "acfql, distilled": "qc-fql", "acrlpd": "qc-rlpd"}
SAME = ("the same", "the same; encoders are ours")


def rows() -> list[tuple[str, str, str, str]]:
    """The table's (published flag, agent, setting here, setting with --compat qc)."""
    section = NAMES.read_text().partition("## Q-chunking's flags")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [tuple(cell.strip() for cell in line.strip("| ").split("|")) for line in table]  # type: ignore[misc]


def words_of(cell: str) -> list[str]:
    return shlex.split(" ".join(re.findall(r"`(.*?)`", cell)))


def given(preset: str, compat: str | None, words: list[str]) -> tuple[ExperimentConfig, ExperimentConfig]:
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
