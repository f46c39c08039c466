"""Presets, published conventions and overrides as one experiment, validated once."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from errors import naming

from serl_chunk.config.agents.acfql import AcfqlConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.critic import CriticConfig, SacCriticConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.agents.gripper import GripperConfig, SacGripperConfig
from serl_chunk.config.agents.published_qc import PublishedQcConfig
from serl_chunk.config.experiment import ActorConfig, ExperimentConfig, ReplayConfig
from serl_chunk.config.fields import value_at
from serl_chunk.config.loader import load_experiment
from serl_chunk.config.presets import NOT_OF_COMPAT, OF_GROUPS, PRESETS, configured
from serl_chunk.config.robots import RobotConfig
from serl_chunk.types import ConfigError

BASE = ExperimentConfig("x", RobotConfig())
OTHERS = ("bc", "acrlpd-pi0", "hg-dagger", "hil-serl", "decoupled", *OF_GROUPS)
OF_FAILING = [name for name in PRESETS if not name.startswith(OTHERS)]
CLONES = [name for name in PRESETS if name.startswith(("bc", "hg-dagger"))]


def with_agent(agent: Any, base: ExperimentConfig = BASE, **changes: Any) -> ExperimentConfig:
    return dataclasses.replace(base, agent=agent, **changes)


@pytest.mark.parametrize("preset", OF_FAILING)
def test_what_follows_from_the_discount_follows_from_the_one_given(preset):
    for discount in ("0.9", "0.9999"):
        for compat in (None,) if preset in NOT_OF_COMPAT else (None, "qc"):
            config = configured(BASE, [("discount", discount)], preset=preset, compat=compat)
            assert config.discount == float(discount)
            assert config.reward.failure_reward == -1.0 / (1 - config.discount)
        alone = configured(with_agent(config.agent), [("discount", discount)], compat="qc")
        assert alone.reward == config.reward
    assert configured(BASE, preset=preset).reward.failure_reward == -1.0 / (1 - BASE.discount)


def test_a_policy_to_start_from_is_not_pretrained_unless_that_is_said():
    started = [("learner.start_from", "runs/clone")]
    steps = lambda *more: configured(BASE, [*started, *more], preset="ript-flow-end").learner.pretrain_steps  # noqa: E731
    assert (steps(), steps(("learner.pretrain_steps", "7"))) == (0, 7)


def test_the_result_alone_is_validated():
    late = dataclasses.replace(BASE, actor=ActorConfig(delay_ticks=2))
    with pytest.raises(ConfigError, match=naming("actor.delay_ticks", 2, "chunk.execute_steps", 1)):
        configured(late, preset="rlpd-qc")
    assert configured(late, [("actor.delay_ticks", "0")], preset="rlpd-qc").actor.delay_ticks == 0
    assert configured(late, [("chunk.horizon", "3")], preset="rlpd-qc").chunk.horizon == 3
    balanced = dataclasses.replace(BASE, replay=ReplayConfig(positive_fraction=0.5))
    assert configured(balanced, compat="qc").replay.positive_fraction is None  # which those windows cannot do


NONE = {"learner.online_steps": "0", "learner.pretrain_steps": "0"}
CRITICS_ENCODER = {"agent.image_keys": "top", "agent.encoder.trained_by": "critic"}
GAUSSIAN = with_agent(BcConfig(policy="gaussian"))
FIXED = with_agent(AcfqlConfig(gripper=GripperConfig(mode="fixed")))
HG_DAGGER = configured(BASE, preset="hg-dagger")
# what `configured` is given: experiment, overrides, preset, compat; what the message names
REFUSED: list[tuple[ExperimentConfig, dict[str, str], str | None, str | None, tuple[object, ...]]] = [
    (BASE, {"discount": "nan"}, "qc", None, ("discount", "nan", "(0, 1)")),
    (BASE, {"discount": "x"}, "qc", None, ("discount", "x")),
    (BASE, {}, "qc-fqk", None, ("preset", "qc-fqk", "'qc-fql'")),
    (GAUSSIAN, {}, None, "qc", ("compat", "bc", "agent.policy=gaussian", "agent.policy=flow")),
    (BASE, {}, "bc-gaussian", "qc", ("compat", "bc-gaussian")),
    *((BASE, {}, preset, "qc", ("compat", "qc", "preset", preset))
      for preset in ("hg-dagger", "rlpd", "hil-serl", "ript")),
    (HG_DAGGER, {}, None, "qc", ("compat", "qc", "preset", "hg-dagger")),
    *((BASE, CRITICS_ENCODER, preset, None, ("agent.encoder.trained_by", "critic", "each", "bc")) for preset in CLONES),
    (BASE, NONE | {"learner.critic_pretrain_steps": "5000"}, "bc", None,
     ("learner.online_steps", 0, "learner.critic_pretrain_steps", 5000, "learner.pretrain_steps")),
    (BASE, {"learner.policy_batch_size": "32"}, "qc", None,
     ("learner.policy_batch_size", 32, "published_qc", "none", "--compat qc")),
    (FIXED, {"agent.gripper.mode": "learned"}, None, None,
     ("agent.gripper.mode", "learned", "agent.gripper.choices", "setup_mode")),
    *((BASE, {f"agent.{name}": "4"}, "qc", "qc", (name.partition(".")[0], its)) for name, its in (
        ("candidates", "actor_num_samples"), ("critic.ensemble", "num_qs"), ("flow.steps", "flow_steps"))),
    *((BASE, {"chunk.horizon": "5"}, preset, compat, ("chunk.horizon", preset, of_chunks, "chunk.return_steps"))
      for preset, of_chunks in (("fql-n", "qc-fql"), ("bfn-n", "qc")) for compat in (None, "qc")),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda c: "-".join(map(str, c[1:4])))
def test_what_does_not_go_together_is_refused_with_the_remedy(case):
    config, overrides, preset, compat, named = case
    with pytest.raises(ConfigError, match=naming(*named)):
        configured(config, list(overrides.items()), preset=preset, compat=compat)


WIDE = CriticConfig(hidden=(8, 9), ensemble=7, tau=0.5)
LEAST = SacCriticConfig(hidden=(8, 9), ensemble=7, target_aggregate="min", tau=0.5)
SHARED: dict[str, Any] = {"lr": 1e-4, "critic_lr": 2e-4}
OF_CRITIC: dict[str, Any] = {"lr": 1e-4, "num_qs": 7, "value_hidden_dims": (8, 9), "actor_hidden_dims": (6,)}
LATE = FlowConfig(hidden=(6,), steps=3)


@pytest.mark.parametrize(
    ("agent", "published"),
    [
        (AcfqlConfig(critic=WIDE, flow=LATE, candidates=9, policy_ema=0.9, **SHARED),
         {"actor_type": "best-of-n", "actor_num_samples": 9, "flow_steps": 3, "q_agg": "mean", **OF_CRITIC}),
        (AcrlpdConfig(critic=LEAST, hidden=(6,), bc_alpha=0.3, candidates=4, target_entropy_per_dim=-2.0,
                      init_temperature=0.1, **SHARED),
         {"agent_name": "acrlpd", "bc_alpha": 0.3, "target_entropy_multiplier": 2.0, "q_agg": "min", **OF_CRITIC}),
        (BcConfig(flow=LATE),
         {"actor_type": "best-of-n", "actor_num_samples": 1, "value_hidden_dims": (6,), "actor_hidden_dims": (6,),
          "flow_steps": 3}),
    ],
    ids=["best-of-n", "gaussian", "clone"],
)  # fmt: skip
def test_the_published_agent_has_our_sizes_and_weights_and_conventions_of_its_own(agent, published):
    config = configured(with_agent(agent), compat="qc")
    assert config.agent == PublishedQcConfig(**published)
    again = dataclasses.replace(config, compat="")  # with or without the flag
    assert configured(again, compat="qc") == configured(config, compat="qc") == config
    assert configured(again, preset="rlpd-ac").agent.kind == "acrlpd"


PUBLISHED = {
    "agent.critic.tau": 0.005, "agent.lr": 3e-4, "agent.bc_alpha": 0.0, "agent.candidates": 1, "chunk.horizon": 1,
    "agent.backup_entropy": False, "agent.target_entropy_per_dim": -0.5, "agent.log_prob": "sum",
    "agent.critic.target_aggregate": "min", "agent.critic.target_subset": 2, "replay.demo_fraction": 0.5,
    "reward.scale": 1.0, "discount": BASE.discount, "agent.kind": "acrlpd", "learner.pretrain_steps": 0,
    "learner.warmup_episodes": 0,
}  # fmt: skip
RLPD = {
    "agent.critic.ensemble": 10, "agent.critic.hidden": (256, 256, 256), "agent.hidden": (256, 256, 256),
    "agent.critic.activation": "relu", "value_range": None, "agent.init_temperature": 1.0, "learner.cta_ratio": 20,
    "agent.policy_layer_norm": False, "agent.log_std_min": -20.0, "agent.kernel_init": "xavier_uniform",
    "learner.utd_ratio": 20.0, "reward.offset": -1.0,
}  # fmt: skip
HIL_SERL = {
    "agent.critic.ensemble": 2, "agent.critic.hidden": (256, 256), "agent.hidden": (256, 256), "learner.cta_ratio": 2,
    "agent.critic.activation": "tanh", "agent.policy_activation": "tanh", "agent.policy_layer_norm": True,
    "agent.init_temperature": 0.01, "agent.log_std_min": pytest.approx(math.log(1e-5)), "learner.utd_ratio": None,
    "agent.encoder.trained_by": "critic", "reward.offset": 0.0, "reward.failure_reward": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(("preset", "own"), [("rlpd", RLPD), ("hil-serl", HIL_SERL)])
def test_online_agents_are_the_published_ones_and_begin_with_the_first_step(preset, own):
    base = with_agent(dataclasses.replace(BASE.agent, image_keys=("top",)))
    config = configured(base, preset=preset)
    assert {path: value_at(config, path) for path in PUBLISHED | own} == PUBLISHED | own
    assert configured(BASE, preset="hil-serl").agent.encoder == BASE.agent.encoder
    loop = configured(base, [("learner.pretrain_steps", "7"), ("learner.utd_ratio", "4")], preset=preset).learner
    assert (loop.pretrain_steps, loop.utd_ratio) == (7, 4.0)


def test_presets_keep_the_grippers_and_published_conventions_do_not():
    config = load_experiment("fake_aloha_discrete_gripper")
    grippers = config.agent.gripper
    assert configured(config, preset="qc").agent.gripper == grippers
    assert configured(config, preset="rlpd").agent.gripper == SacGripperConfig(choices=grippers.choices)
    of_sac = SacGripperConfig(choices=grippers.choices, epsilon=0.5)
    sac = with_agent(AcrlpdConfig(gripper=of_sac), config)
    assert configured(sac, preset="hil-serl").agent.gripper == of_sac
    assert configured(sac, preset="hg-dagger").agent.gripper == grippers
    for preset in ("qc", "rlpd-ac", "bc"):
        assert configured(config, preset=preset, compat="qc").agent.gripper == GripperConfig()
    chosen = configured(FIXED, [("agent.gripper.mode", "learned"), ("agent.gripper.choices", "-1,1")])
    assert chosen.agent.gripper == GripperConfig(choices=(-1.0, 1.0))
