"""What a user of `pi0_fold_box` has: scored episodes as published, a checkpoint of openpi, a file of small sizes."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
from data_sets import hdf5_file, jpeg_rows

from serl_chunk.config.agents.pi0 import PI0_PRESETS
from serl_chunk.models.pi0.tree import initial
from serl_chunk.runs.openpi_checkpoints import export

STEPS, SIDE = 46, 48
EVERY = 20  # steps between two pictures: those of a chunk
PUBLISHED = ("cam_high", "cam_left_wrist", "cam_right_wrist")
SMALL = '''"""`pi0_fold_box` with the sizes of `tiny`, in a simulator."""

from dataclasses import replace

from serl_chunk.config.agents.critic import CriticConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.config.agents.pi0 import PI0_PRESETS
from serl_chunk.config.loader import load_experiment, packaged_folder
from serl_chunk.config.robots import FakeAlohaConfig


def experiment():
    full = load_experiment(str(packaged_folder() / "pi0_fold_box.py"))
    own = full.agent.pi0
    model = replace(PI0_PRESETS["tiny"], trainable=own.trainable, weights=own.weights, steps=2)
    agent = replace(
        full.agent, pi0=model, image_keys=("top", "left_wrist", "right_wrist"), language=LanguageConfig("bytes", 48),
        encoder=EncoderConfig(frame_size=model.image_size), critic=CriticConfig(hidden=(32,), ensemble=2), candidates=4,
    )
    return replace(
        full,
        robot=FakeAlohaConfig(image_size=48, observe_objects=False, max_episode_steps=60, task=full.robot.task),
        agent=agent,
        replay=replace(full.replay, capacity=2_000, demo_capacity=2_000, human_capacity=500, image_capacity=500),
        learner=replace(
            full.learner, batch_size=16, offline_steps=8, max_steps=8, warmup_episodes=1, training_starts=20,
            steps_per_update=4, checkpoint_period=4, export_period=8, utd_ratio=0.1,
        ),
        actor=replace(full.actor, clock="lockstep"),
    )
'''


def write_episodes(folder: Path, cameras: tuple[str, ...] = PUBLISHED, episodes: int = 12) -> Path:
    """Write scored episodes of two arms that swing: JPEG pictures where chunks begin, eight of twelve in `score_5`."""
    for i in range(episodes):
        rng, good = np.random.default_rng(i), i < episodes * 2 // 3
        ticks = np.arange(0, STEPS, EVERY)
        phase = np.arange(STEPS + 1)[:, None] / 15 + rng.uniform(0, 1, 14)
        joints = 0.3 * np.sin(phase)
        joints[:, [6, 13]] = 0.5 + 0.4 * np.sin(phase[:, [6, 13]])
        blocks = rng.integers(0, 256, (len(cameras), len(ticks), 2, 2, 3), dtype=np.uint8)
        pictures = blocks.repeat(SIDE // 2, 2).repeat(SIDE // 2, 3)
        shown = {f"observations/images/{name}": jpeg_rows(pictures[c]) for c, name in enumerate(cameras)}
        content = {
            "observations/qpos": joints[:-1], "observations/qvel": np.gradient(joints, axis=0)[:-1],
            "action": joints[1:], "image_indices": ticks, "chunk_starts": ticks, **shown,
        }  # fmt: skip
        hdf5_file(folder / ("score_5" if good else "score_1") / f"episode_{i}.hdf5", content)
    return folder


def write_small(folder: Path) -> None:
    """Write into a working folder what the page's commands use, in small sizes and under its names."""
    write_episodes(folder / "raw" / "fold_box", ("top", "left_wrist", "right_wrist"))
    export(
        folder / "checkpoints" / "pi0_base", PI0_PRESETS["tiny"], initial(PI0_PRESETS["tiny"], jax.random.key(0)), {}
    )
    (folder / "experiments").mkdir()
    (folder / "experiments" / "pi0_fold_box.py").write_text(SMALL)
