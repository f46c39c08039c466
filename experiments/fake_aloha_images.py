"""The simulated bimanual task from three small cameras: the state is the 14 joints, the cube is in the pictures alone.

serl-chunk record --exp_name fake_aloha_images --policy scripted --n_demos 30 --out demos/images
serl-chunk --exp_name fake_aloha_images --learner --actor --demo_path demos/images --checkpoint_path runs/images
"""

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.experiment import (
    ActorConfig,
    ChunkConfig,
    ExperimentConfig,
    LearnerConfig,
    NormaliserConfig,
    ReplayConfig,
)
from serl_chunk.config.robots import FakeAlohaConfig

CAMERAS = ("top", "left_wrist", "right_wrist")


def experiment() -> ExperimentConfig:
    """Small sizes for a CPU core: half an hour to a policy that succeeds, of which the encoder takes four fifths."""
    return ExperimentConfig(
        name="fake_aloha_images",
        robot=FakeAlohaConfig(image_size=48, observe_objects=False),
        # On a CPU the encoder is nearly all of an update: few channels, and one pass of the flow's in place of three.
        agent=AcfqlConfig(
            image_keys=CAMERAS, encoder=EncoderConfig(features=(8, 16, 32), latent=32, shift=2), policy_updates=1
        ),
        chunk=ChunkConfig(horizon=5),
        normaliser=NormaliserConfig(actions="relative"),
        replay=ReplayConfig(capacity=60_000, demo_capacity=10_000, human_capacity=10_000, image_capacity=40_000),
        learner=LearnerConfig(
            batch_size=64,
            utd_ratio=0.25,
            max_steps=12_000,
            pretrain_steps=6_000,
            critic_pretrain_steps=0,
            warmup_episodes=16,
            steps_per_update=50,
            checkpoint_period=2_000,
        ),
        actor=ActorConfig(clock="lockstep", intervention="scripted"),
        discount=0.985,  # 0.985**120 = 0.16
    )
