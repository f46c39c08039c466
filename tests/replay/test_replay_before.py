"""The action before a window, which a grasp critic's labels and its penalty ask for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from coded_episodes import Checker, config, feed, make
from coded_replay import build

from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.gripper import SacGripperConfig

COUNTING = AcrlpdConfig(gripper=SacGripperConfig(choices=(-1.0, 1.0), penalty=-0.5))


@pytest.mark.parametrize("capacity", [20_000, 600])  # 600: rows are used again and again
def test_it_is_the_tick_befores_of_the_same_episode(capacity):
    rng = np.random.default_rng(0)
    cfg = dataclasses.replace(config(4, 4, capacity=capacity, demo_fraction="uniform"), agent=COUNTING)
    episodes = [make(rng, i, session=f"s{i % 3}", human=False) for i in range(120)]
    replay = build(cfg)
    feed(replay, episodes, rng)
    held = {key[1] for key in replay.episodes()}
    checker = Checker([e for e in episodes if e.episode_id in held], cfg, image_keys=())
    seen = set()
    for _ in range(8):
        seen |= checker.check(replay.sample(rng, 4_000))
    assert {t for _, t in seen} >= {0, 1, 2}
    assert replay.sample(rng, 6, 2).prev_action.shape == (2, 6, 2)


def test_without_chosen_grippers_no_memory_is_used_for_it():
    rng = np.random.default_rng(1)
    replay = build(config(4, 4))
    feed(replay, [make(rng, i) for i in range(9)], rng)
    assert replay.sample(rng, 6, 2).prev_action is None
