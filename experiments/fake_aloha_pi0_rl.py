"""The simulated bimanual task by a small pi0 that was cloned before, which a critic on its features improves.

serl-chunk pi0 export runs/pi0 clone --exp_name fake_aloha_pi0
serl-chunk pi0 import clone clone.npz --exp_name fake_aloha_pi0_rl
serl-chunk --exp_name fake_aloha_pi0_rl --local --config.agent.pi0.weights=clone.npz --demo_path demos/pi0 \
    --checkpoint_path runs/pi0_rl
"""

from dataclasses import replace

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.critic import CriticConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.loader import load_experiment


def experiment() -> ExperimentConfig:
    """As `fake_aloha_pi0`; the model is constant, and the best of its chunk and 15 edited ones acts."""
    base = load_experiment("fake_aloha_pi0")
    a, model = base.agent, base.agent.as_pi0
    assert model is not None
    return replace(
        base,
        name="fake_aloha_pi0_rl",
        agent=AcfqlConfig(
            policy="pi0",
            pi0=replace(model, trainable="none"),
            image_keys=a.image_keys,
            encoder=a.encoder,
            language=a.language,
            critic=CriticConfig(ensemble=4),
            edit_scale=0.05,
            policy_ema=0.0,
            policy_updates=1,
        ),
        learner=replace(
            base.learner, batch_size=64, policy_batch_size=32, pretrain_steps=0, max_steps=10_000, utd_ratio=0.5
        ),
    )
