"""A released pi0 that folds a box with an ALOHA: critics on its features, from scored episodes, then with actors.

The sizes are those of ACRLPD on pi0, as published for this task. docs/pi0.md has the steps from a checkpoint to a
better one, docs/algorithms/pi0.md what is done in another way, and why.

serl-chunk pi0 import checkpoints/pi0_base pi0_base.npz --exp_name pi0_fold_box
serl-chunk data stats raw/fold_box --actions delta --mask 6,-1,6,-1 --horizon 20 --robot aloha --out aloha_fold_box
serl-chunk --exp_name pi0_fold_box --learner --dry_run --demo_path raw/fold_box --demo_color rgb --demo_hz 50
"""

from dataclasses import replace

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.critic import CriticConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.language import LanguageConfig
from serl_chunk.config.agents.pi0 import PI0_PRESETS
from serl_chunk.config.experiment import ActorConfig, ChunkConfig, ExperimentConfig, LearnerConfig, ReplayConfig
from serl_chunk.config.presets import PI0_ROBOTS
from serl_chunk.config.robots import AlohaConfig
from serl_chunk.config.transport import TransportConfig


def experiment() -> ExperimentConfig:
    """The actions' expert imitates successes and interventions; the critic chooses among 32 of its chunks."""
    aloha = PI0_ROBOTS["aloha"]
    model = replace(PI0_PRESETS["pi0"], trainable="expert", weights="pi0_base.npz", lr_warmup=1_000, grad_clip=1.0)
    return ExperimentConfig(
        name="pi0_fold_box",
        robot=AlohaConfig(
            server="127.0.0.1",
            cameras=aloha.cameras,
            image_size=(480, 640),
            max_episode_steps=1_500,  # 30 s
            task="fold the box",
        ),
        agent=AcfqlConfig(
            policy="pi0",
            pi0=model,
            image_keys=aloha.cameras,
            encoder=EncoderConfig(frame_size=model.image_size),
            language=LanguageConfig("sentencepiece", length=48, model="paligemma_tokenizer.model"),
            critic=CriticConfig(hidden=(256, 256, 256), ensemble=10, tau=0.005),
            candidates=32,
            lr=2.5e-5,
            policy_ema=0.999,
            policy_updates=1,
        ),
        chunk=ChunkConfig(horizon=20),  # of the released model 50: it is fine-tuned on these
        normaliser=aloha.normaliser("aloha_fold_box/norm_stats.json"),
        replay=ReplayConfig(
            capacity=100_000, demo_capacity=300_000, human_capacity=20_000, image_capacity=10_000, positive_fraction=0.1
        ),
        learner=LearnerConfig(
            batch_size=128,
            accumulate=4,
            offline_steps=20_000,
            max_steps=30_000,
            warmup_episodes=4,
            steps_per_update=200,
            checkpoint_period=5_000,
            export_period=5_000,
        ),
        actor=ActorConfig(clock="realtime"),
        transport=TransportConfig(snapshot_dtype="bfloat16"),
        discount=0.99,  # of 20 steps 0.82; of 30 s nothing is left, as a learner warns: longer values need 0.999
    )
