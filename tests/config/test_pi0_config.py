"""Sizes of pi0 that cannot work together, and presets."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from errors import naming

from serl_chunk.config.agents.pi0 import PI0_PRESETS, ExpertConfig, Pi0Config, SiglipConfig, VlmConfig
from serl_chunk.config.presets import PI0_ROBOTS
from serl_chunk.types import ConfigError

TINY = PI0_PRESETS["tiny"]


def test_a_cameras_tokens_follow_from_its_pixels():
    assert PI0_PRESETS["pi0"].token_grid == (16, 16)
    assert PI0_PRESETS["pi0"].camera_tokens == 256
    odd = dataclasses.replace(TINY, image_size=(48, 30))
    assert odd.token_grid == (4, 2)


def test_presets_differ_in_what_their_names_say():
    assert PI0_PRESETS["pi05"] == dataclasses.replace(PI0_PRESETS["pi0"], pi05=True)
    for name, ranks in (("pi0_lora", (16, 0)), ("pi0_lora_both", (16, 32))):
        config = PI0_PRESETS[name]
        assert (config.vlm.attention_rank, config.expert.attention_rank) == ranks
        assert (config.vlm.mlp_rank, config.expert.mlp_rank) == ranks
        assert config.vlm.attention_alpha == 16.0
        assert config.expert.attention_alpha == 32.0
        assert config.trainable == "lora"


@pytest.mark.parametrize("name", PI0_ROBOTS)
def test_a_robots_settings_fit_the_released_model(name):
    robot, model = PI0_ROBOTS[name], PI0_PRESETS["pi0"]
    assert len(robot.cameras) <= len(model.cameras)
    assert max(robot.state_dim, robot.action_dim) <= model.action_dim
    assert sum(map(abs, robot.delta_mask)) in (0, robot.action_dim)
    made = robot.normaliser("stats.json", pi05=True)
    assert (made.actions, made.norm_stats, made.scaling) == ("openpi", "stats.json", "quantiles")
    assert robot.normaliser("stats.json").scaling == "z_score"
    assert (made.robot == "aloha") == name.startswith("aloha")


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: SiglipConfig(width=64, heads=5), ("agent.pi0.siglip.heads", 64, 5)),
        (lambda: VlmConfig(width=0), ("agent.pi0.vlm.width", 0)),
        (lambda: ExpertConfig(mlp_rank=-1), ("agent.pi0.expert.mlp_rank", -1)),
        (lambda: dataclasses.replace(TINY, head_dim=15), ("agent.pi0.head_dim", 15)),
        (lambda: dataclasses.replace(TINY, kv_heads=3), ("agent.pi0.kv_heads", 4, 3)),
        (lambda: dataclasses.replace(TINY, expert=ExpertConfig(width=33)), ("agent.pi0.expert.width", 33)),
        (lambda: dataclasses.replace(TINY, cameras=("a", "a")), ("agent.pi0.cameras", "a, a")),
        (lambda: dataclasses.replace(TINY, image_size=(48, 8)), ("agent.pi0.image_size", "48, 8", 12)),
        (lambda: dataclasses.replace(TINY, feature_grid=3), ("agent.pi0.feature_grid", 3)),
        (lambda: dataclasses.replace(TINY, trainable="lora"), ("agent.pi0.trainable", "agent.pi0.vlm.mlp_rank")),
        (lambda: dataclasses.replace(TINY, trainable="lora_expert"), ("agent.pi0.trainable", "lora_expert")),
        (lambda: dataclasses.replace(TINY, dtype="float16"), ("agent.pi0.dtype", "float16")),
    ],
)  # fmt: skip
def test_sizes_that_cannot_work_are_refused(build: Any, named: tuple[object, ...]):
    with pytest.raises(ConfigError, match=naming(*named)):
        build()


def test_the_defaults_are_the_released_model():
    assert Pi0Config() == PI0_PRESETS["pi0"]
