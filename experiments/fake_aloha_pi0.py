"""The simulated bimanual task from three cameras and its text, cloned by a small pi0 that begins with random numbers.

serl-chunk record --exp_name fake_aloha_pi0 --policy scripted --n_demos 200 --out demos/pi0
serl-chunk --exp_name fake_aloha_pi0 --local --demo_path demos/pi0 --checkpoint_path runs/pi0
"""

from dataclasses import replace

from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.config.agents.pi0 import PI0_PRESETS
from serl_chunk.config.experiment import (
    ActorConfig,
    ChunkConfig,
    ExperimentConfig,
    LearnerConfig,
    NormaliserConfig,
    ReplayConfig,
)
from serl_chunk.config.robots import FakeAlohaConfig

CAMERAS = ("top", "left_wrist", "right_wrist")  # in the order of the model's


def experiment() -> ExperimentConfig:
    """Sizes for CPU cores; a released model is that of docs/pi0.md."""
    model = replace(PI0_PRESETS["tiny"], depth=2, steps=5, remat=False, lr_warmup=100)
    return ExperimentConfig(
        name="fake_aloha_pi0",
        robot=FakeAlohaConfig(image_size=48, observe_objects=False, task="hand over the cube"),
        agent=BcConfig(
            policy="pi0",
            pi0=model,
            image_keys=CAMERAS,
            encoder=EncoderConfig(frame_size=model.image_size),
            language=LanguageConfig("bytes", length=96),
            lr=1e-3,
            policy_ema=0.99,
            policy_updates=1,
        ),
        chunk=ChunkConfig(horizon=5),
        normaliser=NormaliserConfig(actions="relative"),
        replay=ReplayConfig(capacity=60_000, demo_capacity=10_000, human_capacity=10_000, image_capacity=40_000),
        learner=LearnerConfig(
            batch_size=32,
            utd_ratio=0.25,
            max_steps=4_000,
            pretrain_steps=4_000,
            warmup_episodes=4,
            steps_per_update=50,
            checkpoint_period=2_000,
        ),
        actor=ActorConfig(clock="lockstep", intervention="scripted"),
        discount=0.985,  # 0.985**120 = 0.16
    )
