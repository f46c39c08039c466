"""Named algorithms, as changes of an experiment: `--preset qc`, and `--compat qc` for the published conventions.

A preset replaces the agent and the lengths. Its numbers, sizes included, are those of Li, Zhou and Levine (2025). Those
of `rlpd` are of Ball et al. (2023), those of `hil-serl` of Luo et al. (2024), and both replace the training loop too.
`--compat qc` replaces the agent by that of Q-chunking's code, and our conventions of windows, rewards and the
normaliser by its own (docs/algorithms/published_names.md has the reasons); `--compat openpi` trains a pi0 as openpi
does. All are validated together with the overrides of the command line.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, NamedTuple

from serl_chunk.config.agents.acfql import AcfqlConfig, DecoupledConfig
from serl_chunk.config.agents.acrlpd import AcrlpdConfig
from serl_chunk.config.agents.base import AgentConfig
from serl_chunk.config.agents.bc import BcConfig
from serl_chunk.config.agents.critic import SacCriticConfig
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.agents.flow import FlowConfig
from serl_chunk.config.agents.gripper import GripperConfig, SacGripperConfig
from serl_chunk.config.agents.groups import GroupAgentConfig
from serl_chunk.config.agents.published_qc import WIDTHS, PublishedQcConfig
from serl_chunk.config.experiment import (
    ChunkConfig,
    ExperimentConfig,
    NormaliserConfig,
    RewardConfig,
    infinite_horizon_return,
)
from serl_chunk.config.fields import require
from serl_chunk.config.groups import GroupConfig
from serl_chunk.config.overrides import apply_overrides, parse
from serl_chunk.types import ConfigError

HORIZON = 5  # actions in a published chunk
FLOW = FlowConfig(hidden=WIDTHS, steps=10)
_BEST, _ONE_STEP = "best-of-n", "distill-ddpg"
HG_DAGGER_PRETRAIN = 20_000  # HIL-SERL's --pretrain_steps
GROUP_PRETRAIN = 8_000  # updates of a clone, where the experiment has none
# RIPT-VLA's scripts for OpenVLA-OFT: an iteration has one epoch of 12 gradient steps.
_RIPT: dict[str, Any] = {
    "density": "tick", "sigma": 0.0, "clip": 0.1, "epochs": 1, "minibatch": 256, "groups": 24, "iterations": 12,
    "eval_every": 1, "mastered": 8, "weigh": "episode",
}  # fmt: skip
_RIPT_AGENT: dict[str, Any] = {"iteration_lr": 5e-5}
# docs/algorithms/groups.md: what a flow's clone learns by, and does not drift without a signal.
_RIPT_END: dict[str, Any] = {
    "density": "end", "sigma": 0.05, "clip": 0.2, "minibatch": 4096, "groups": 64, "max_groups": 64, "iterations": 70,
}  # fmt: skip
SAC_WIDTH = 256  # of a layer of RLPD's and HIL-SERL's networks

Changes = dict[str, Any]  # fields of an ExperimentConfig -> their new values


class Preset(NamedTuple):
    """One algorithm as changes of an experiment, given the discount it will have."""

    description: str  # for --help
    changes: Callable[[ExperimentConfig, float], Changes]


def _lengths(config: ExperimentConfig, horizon: int, return_steps: int | None = None) -> ChunkConfig:
    return replace(config.chunk, horizon=horizon, critic_horizon=None, execute_steps=None, return_steps=return_steps)


def _rewards_of(config: ExperimentConfig, discount: float) -> RewardConfig:
    """-1 until success and 0 at it: what the published weights (alpha, temperature) are scaled for."""
    worst = infinite_horizon_return(-1.0, discount)  # of failing: as bad as never succeeding
    return replace(config.reward, scale=1.0, offset=-1.0, failure_reward=worst)


def _common(config: ExperimentConfig, gripper: type[GripperConfig] = GripperConfig) -> Changes:
    """Return what a preset leaves of an agent: its inputs, and its gripper with the settings that are of both."""
    a = config.agent
    shared = {f.name for f in fields(gripper)} & {f.name for f in fields(a.gripper)}
    inputs = {"image_keys": a.image_keys, "use_state": a.use_state, "encoder": a.encoder, "language": a.language}
    return {**inputs, "gripper": gripper(**{name: getattr(a.gripper, name) for name in shared})}


def _flow(
    config: ExperimentConfig, discount: float, actor: Any, candidates: int, horizon: int, returns: int | None = None
) -> Changes:
    samples: Changes = {"actor_num_samples": candidates} if actor == _BEST else {}
    agent = PublishedQcConfig(**_common(config), actor_type=actor, **samples)
    return {"agent": agent, "reward": _rewards_of(config, discount), "chunk": _lengths(config, horizon, returns)}


def _gaussian(config: ExperimentConfig, discount: float, horizon: int, bc_alpha: float) -> Changes:
    agent = AcrlpdConfig(
        **_common(config, SacGripperConfig),
        critic=SacCriticConfig(hidden=WIDTHS, ensemble=10, target_subset=10, target_aggregate="mean"),
        hidden=WIDTHS, bc_alpha=bc_alpha, candidates=1, bc_on="all",
        log_prob="sum", init_temperature=1.0,  # the published weight, temperature and entropy are scaled for the sum
    )  # fmt: skip
    return {"agent": agent, "reward": _rewards_of(config, discount), "chunk": _lengths(config, horizon)}


# What the published SAC agents have in common, where our defaults differ: acrlpd of one action, without imitation.
_SAC: Changes = {
    "candidates": 1, "bc_alpha": 0.0, "bc_on": "all", "log_prob": "sum",
    "target_entropy_per_dim": -0.5, "backup_entropy": False, "kernel_init": "xavier_uniform",
}  # fmt: skip


def _online(config: ExperimentConfig, utd_ratio: float | None, cta_ratio: int) -> Changes:
    """Return the loop of RLPD and HIL-SERL: half demonstrations in every batch, and no phase before the first step."""
    loop = replace(config.learner, pretrain_steps=0, critic_pretrain_steps=0, warmup_episodes=0)
    return {
        "chunk": _lengths(config, 1),
        "replay": replace(config.replay, demo_fraction=0.5, positive_fraction=None),
        "learner": replace(loop, utd_ratio=utd_ratio, cta_ratio=cta_ratio),
    }


def _rlpd(config: ExperimentConfig, discount: float) -> Changes:
    """RLPD's settings for sparse rewards (its Adroit runs), which leave the entropy out of the target."""
    hidden = (SAC_WIDTH,) * 3
    critic = SacCriticConfig(hidden=hidden, ensemble=10, target_subset=2, target_aggregate="min", tau=0.005)
    agent = AcrlpdConfig(
        **_common(config, SacGripperConfig), **_SAC, critic=critic, hidden=hidden, init_temperature=1.0,
        policy_layer_norm=False, log_std_min=-20.0,
    )  # fmt: skip
    return _online(config, 20.0, 20) | {"agent": agent, "reward": _rewards_of(config, discount)}


def _hil_serl(config: ExperimentConfig, discount: float) -> Changes:
    """HIL-SERL's SAC; rewards are 1 at a success, which the initial temperature is scaled for."""
    common, hidden = _common(config, SacGripperConfig), (SAC_WIDTH,) * 2
    if config.agent.image_keys:
        common["encoder"] = replace(config.agent.encoder, trained_by="critic")
    critic = SacCriticConfig(
        hidden=hidden, ensemble=2, target_subset=2, target_aggregate="min", tau=0.005, activation="tanh"
    )
    agent = AcrlpdConfig(
        **common, **_SAC, critic=critic, hidden=hidden, init_temperature=0.01,
        policy_activation="tanh", policy_layer_norm=True, log_std_min=math.log(1e-5),
    )  # fmt: skip
    reward = replace(config.reward, scale=1.0, offset=0.0, failure_reward=0.0)
    return _online(config, None, 2) | {"agent": agent, "reward": reward}


def _clone(config: ExperimentConfig, policy: Any, bc_on: Any = "all") -> Changes:
    encoder = config.agent.encoder
    if encoder.trained_by == "critic":  # a clone has none
        encoder = replace(encoder, trained_by="each")
    agent = BcConfig(
        **_common(config) | {"encoder": encoder},
        policy=policy, flow=FLOW, hidden=WIDTHS, policy_updates=1, policy_ema=0.0, bc_on=bc_on, bc_joint_noise=0.0,
    )  # fmt: skip
    return {"agent": agent, "chunk": _lengths(config, HORIZON)}


def _decoupled(config: ExperimentConfig) -> Changes:
    """The experiment's own agent where it is acfql, with a critic of twice as many actions as are executed."""
    a = config.agent
    own = {f.name: getattr(a, f.name) for f in fields(a)} if isinstance(a, AcfqlConfig) else _common(config)
    chunk = replace(config.chunk, critic_horizon=2 * config.chunk.executed, return_steps=None)
    return {"agent": DecoupledConfig(**own), "chunk": chunk}


def _acrlpd_pi0(config: ExperimentConfig) -> Changes:
    """The experiment's pi0 by ACRLPD's rule, with what is wrong in it corrected (docs/algorithms/pi0.md)."""
    a = config.agent
    if (model := a.as_pi0) is None:
        remedy = "Use an experiment with agent.policy=pi0."
        raise ConfigError(f"acrlpd-pi0 improves a pi0, and agent.policy is another. {remedy}", parameter="preset")
    own = {f.name: getattr(a, f.name) for f in fields(a)} if type(a) is AcfqlConfig else _common(config)
    critic = SacCriticConfig(hidden=(256,) * 3, ensemble=10, target_subset=10, target_aggregate="min", tau=0.005)
    own |= {
        "policy": "pi0", "pi0": replace(model, trainable="expert") if model.trainable == "none" else model,
        "critic": critic, "target": "policy", "improve_by": "q_gradient", "bc_weight": 0.05, "bc_on": "+successes",
        "candidates": 32, "edit_scale": 0.0, "policy_updates": 1, "policy_ema": 0.999,
    }  # fmt: skip
    replay = replace(config.replay, positive_fraction=0.1)
    return {"agent": AcfqlConfig(**own), "replay": replay}


def _hg_dagger(config: ExperimentConfig, policy: Any) -> Changes:
    """Cloning of demonstrations, then of these and human steps online (Kelly 2019; HIL-SERL's train_hgdagger)."""
    learner, changes = config.learner, _clone(config, policy, "demo+interventions")
    if not learner.pretrain_steps:
        learner = replace(learner, pretrain_steps=HG_DAGGER_PRETRAIN)
    if policy == "flow" and config.normaliser.actions == "relative" and not config.agent.image_keys:
        changes["agent"] = replace(changes["agent"], bc_joint_noise=1.0)  # with less it overfits few demonstrations
    return changes | {
        # The demonstration half has the windows that start on a human step too: every row is imitated.
        "replay": replace(config.replay, demo_fraction=1.0),
        "learner": learner,
    }


def _groups(config: ExperimentConfig, agent: Changes, group: Changes, accumulate: int = 1) -> Changes:
    """The experiment's own lengths and flow, or pi0: cloned, then improved on episodes that no script helps."""
    a, learner, actor = config.agent, config.learner, config.actor
    own = {f.name: getattr(a, f.name) for f in fields(a)} if isinstance(a, BcConfig) else _common(config)
    own |= {"policy": "flow", "flow": getattr(a, "flow", FlowConfig())} | agent
    if a.encoder.trained_by == "critic":  # a clone has none
        own["encoder"] = replace(a.encoder, trained_by="each")
    if a.as_pi0:
        own["policy"] = "pi0"
        of_pi0: Changes = {"density": "end", "sigma": 0.05} if group.get("density") == "tick" else {}
        group = {"noise": 1.0, **group, **of_pi0}  # it was trained from no other noise
    if actor.intervention == "scripted":
        actor = replace(actor, intervention="none")
    learner = replace(
        learner, pretrain_steps=learner.pretrain_steps or GROUP_PRETRAIN, critic_pretrain_steps=0, warmup_episodes=0,
        accumulate=accumulate,
    )  # fmt: skip
    return {
        "agent": GroupAgentConfig(**own),
        "chunk": replace(config.chunk, critic_horizon=None, return_steps=None),
        "group": GroupConfig(**group),
        "learner": learner,
        "actor": replace(actor, adaptive_execution=False),
    }


PRESETS: dict[str, Preset] = {
    name: Preset(description, changes)
    for name, description, changes in (
        ("qc", "Q-chunking: flow policy, best of 32 in chunks of 5", lambda c, g: _flow(c, g, _BEST, 32, HORIZON)),
        ("qc-fql", "Q-chunking with a one-step policy distilled from the flow (alpha 100), chunks of 5",
         lambda c, g: _flow(c, g, _ONE_STEP, 1, HORIZON)),
        ("bfn", "best of 4 flow samples, single actions", lambda c, g: _flow(c, g, _BEST, 4, 1)),
        ("bfn-n", "as bfn, with returns over 5 steps", lambda c, g: _flow(c, g, _BEST, 4, 1, HORIZON)),
        ("fql", "flow Q-learning: as qc-fql, single actions", lambda c, g: _flow(c, g, _ONE_STEP, 1, 1)),
        ("fql-n", "as fql, with returns over 5 steps", lambda c, g: _flow(c, g, _ONE_STEP, 1, 1, HORIZON)),
        ("rlpd", "RLPD for sparse rewards: SAC with prior data, least of 2 of 10 critics, 20 updates a step; single "
         "actions", _rlpd),
        ("hil-serl", "HIL-SERL's SAC: two critics, updates as fast as the learner can; single actions", _hil_serl),
        ("rlpd-qc", "Q-chunking's RLPD: mean of ten critics, no entropy in the target; single actions",
         lambda c, g: _gaussian(c, g, 1, 0)),
        ("rlpd-ac", "RLPD on chunks of 5", lambda c, g: _gaussian(c, g, HORIZON, 0)),
        ("qc-rlpd", "RLPD on chunks of 5, with imitation (bc_alpha 0.01)", lambda c, g: _gaussian(c, g, HORIZON, 0.01)),
        ("decoupled", "the experiment's acfql with decoupled critics: one of twice the executed actions teaches one of "
         "these", lambda c, g: _decoupled(c)),
        ("acrlpd-pi0", "pi0 by the gradient of ten critics through the best of four samples, next to imitation",
         lambda c, g: _acrlpd_pi0(c)),
        ("bc", "behaviour cloning by flow matching, chunks of 5", lambda c, g: _clone(c, "flow")),
        ("bc-gaussian", "behaviour cloning with a tanh-squashed Gaussian, chunks of 5",
         lambda c, g: _clone(c, "gaussian")),
        ("hg-dagger", "HG-DAgger: clones demonstrations, then also human steps online; flow policy, chunks of 5",
         lambda c, g: _hg_dagger(c, "flow")),
        ("ript", "RIPT-VLA: groups of 8, leave-one-out, clipped ratios of each action of a Laplace head",
         lambda c, g: _groups(c, {"policy": "laplace"} | _RIPT_AGENT, _RIPT, 4)),
        ("ript-flow-end", "as ript, with a flow whose chunks are sampled with noise at their end: begin with it",
         lambda c, g: _groups(c, {"iteration_lr": 2e-4}, _RIPT_END)),
        ("ript-flow-sde", "as ript, with a flow that takes one random step in each decision",
         lambda c, g: _groups(c, {}, {})),
        ("flow-ipo", "FlowIPO: velocities between the sample's and a reference's, by the episode's outcome",
         lambda c, g: _groups(c, {"rule": "flow_ipo"}, {"noise": 1.0, "sigma": 0.0})),
        ("filtered-bc", "cloning of an iteration's successes, or with agent.successes=all of all: the baseline",
         lambda c, g: _groups(c, {"rule": "filtered_bc"}, {})),
        ("hg-dagger-gaussian", "as hg-dagger, with a tanh-squashed Gaussian", lambda c, g: _hg_dagger(c, "gaussian")),
    )
}  # fmt: skip


Overrides = Sequence[tuple[str, str]]  # dotted path, text


def configured(
    config: ExperimentConfig, overrides: Overrides = (), *, preset: str | None = None, compat: str | None = None
) -> ExperimentConfig:
    """Return `config` with a preset, published conventions and overrides, applied in this order; raises ConfigError.

    Only the result is validated: an override may repair what the others leave invalid. Its discount is theirs too.
    """
    given = dict(overrides)
    discount = parse(given["discount"], float, "discount") if "discount" in given else config.discount
    if not 0 < discount < 1:
        return apply_overrides(config, overrides)  # which refuses it
    changes = _preset_changes(config, preset, discount) if preset is not None else {}
    if compat is not None:
        chosen = preset or config.preset
        reason = NOT_OF_COMPAT.get(chosen, "") if compat == "qc" else ""
        require(not reason, "compat", f"{compat} excludes preset={chosen}: {reason}. Leave it out.")
        agent, chunk = changes.get("agent", config.agent), changes.get("chunk", config.chunk)
        if compat == "openpi":
            # What it decides depends on what is trained, which an override may say.
            own = [(path.removeprefix("agent."), text) for path, text in overrides if path.startswith("agent.")]
            changes |= _openpi(config, apply_overrides(agent, own))
        else:
            changes |= _compat_changes(config, agent, chunk, compat, discount)
    changes |= _composed_anew(changes.get("agent", config.agent), overrides)
    _check_single_actions(preset or config.preset, changes.get("chunk", config.chunk).horizon, overrides)
    if given.get("learner.start_from") and "learner.pretrain_steps" not in given:  # its policy is trained already
        overrides = [*overrides, ("learner.pretrain_steps", "0")]
    return apply_overrides(config, overrides, changes)


def _composed_anew(agent: AgentConfig, overrides: Overrides) -> Changes:
    """Return a fresh gripper where an override turns a fixed one into a learned one or back."""
    given = dict(overrides)
    said = given.get("agent.gripper.mode", ""), *given.get("agent.gripper.setup_mode", "").split("-")
    other = {"learned": "fixed", "fixed": "learned"}.get(agent.gripper.composition)
    if other is None or other not in said:
        return {}
    chosen = {"agent.gripper.choices", "agent.gripper.setup_mode"} & given.keys()
    wrong = "learned has nothing to choose among: this gripper is fixed"
    remedy = "Set agent.gripper.choices, or a learned-gripper setup_mode in place of it."
    require(other == "fixed" or bool(chosen), "agent.gripper.mode", f"{wrong}. {remedy}")
    return {"agent": replace(agent, gripper=type(agent.gripper)())}


def _preset_changes(config: ExperimentConfig, name: str, discount: float) -> Changes:
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"unknown preset {name!r}{hint}. Valid: {', '.join(PRESETS)}", parameter="preset")
    return _without_adaptive(config) | PRESETS[name].changes(config, discount) | {"preset": name}


OF_CHUNKS = {"bfn-n": "qc", "fql-n": "qc-fql"}  # presets of single actions and longer returns -> theirs of chunks


def _check_single_actions(preset: str, horizon: int, overrides: Overrides) -> None:
    """Refuse a horizon: the published scripts give the returns of these agents as `--horizon_length`, our chunk's."""
    if preset not in OF_CHUNKS:
        return
    given = dict(overrides).get("chunk.horizon")
    horizon = horizon if given is None else parse(given, int, "chunk.horizon")
    wrong = f"must be 1 with preset={preset}, which executes single actions, got {horizon}"
    remedy = f"the length of the returns is chunk.return_steps; for chunks use preset={OF_CHUNKS[preset]}"
    require(horizon <= 1, "chunk.horizon", f"{wrong}. Leave it out: {remedy}.")


def _without_adaptive(config: ExperimentConfig) -> Changes:
    # No agent that follows sets `agent.replan_spread`.
    return {"actor": replace(config.actor, adaptive_execution=False)}


COMPAT = ("qc", "openpi")
_NO_DAGGER = "the published code has no HG-DAgger, and its sampler draws no interventions"
OF_GROUPS = ("ript", "ript-flow-end", "ript-flow-sde", "flow-ipo", "filtered-bc")
NOT_OF_COMPAT = {  # presets of which Q-chunking's code has no version
    "bc-gaussian": "the published code has no Gaussian clone",
    "hg-dagger": _NO_DAGGER,
    "hg-dagger-gaussian": _NO_DAGGER,
    "acrlpd-pi0": "the published code has no pi0",
    "rlpd": "the RLPD of the published code is preset=rlpd-qc",
    "hil-serl": "the published code has no HIL-SERL",
    **dict.fromkeys(OF_GROUPS, "the published code trains on no groups"),
}


def _compat_changes(
    config: ExperimentConfig, agent: AgentConfig, chunk: ChunkConfig, name: str, discount: float
) -> Changes:
    require(name in COMPAT, "compat", f"unknown published code {name!r}. Valid: {', '.join(COMPAT)}")
    if agent.prefix_critic:  # is switched off: the critic left scores the whole chunk, which is then executed
        returned = chunk.return_steps if chunk.returned >= chunk.horizon else None
        chunk = replace(chunk, critic_horizon=None, execute_steps=None, return_steps=returned)
    return _without_adaptive(config) | {
        "agent": _published(agent),
        "chunk": chunk,
        "reward": _rewards_of(config, discount),
        "replay": replace(config.replay, windows="qc", terminal_windows="drop", positive_fraction=None),
        "normaliser": replace(config.normaliser, actions="absolute_range", state=False, norm_stats="", demo_range=1.0),
        "learner": replace(config.learner, eval_mode="sampled"),
        "compat": name,
    }


def _openpi(config: ExperimentConfig, agent: AgentConfig) -> Changes:
    """openpi's loss, what it computes, and the numbers of its training (its defaults; without an average for LoRA)."""
    if (own := agent.as_pi0) is None:
        remedy = "Use an experiment with agent.policy=pi0, without --preset."
        raise ConfigError(f"openpi has conventions for pi0 alone. {remedy}", parameter="compat")
    model = replace(
        own, published=True, augment=bool(agent.image_keys),
        lr_warmup=1_000, lr_cosine=30_000, weight_decay=1e-10, grad_clip=1.0,
    )  # fmt: skip
    if model.vlm.has_lora or model.expert.has_lora:
        model = replace(model, lora_init="openpi")
    trained: Changes = {
        "pi0": model, "bc_joint_noise": 0.0, "policy_updates": 1, "encoder": replace(agent.encoder, shift=0),
        "policy_ema": 0.99 if model.trainable == "full" else 0.0, "lr": 2.5e-5,
    }  # fmt: skip
    learner = replace(config.learner, batch_size=32)
    return {"agent": replace(agent, **trained), "learner": learner, "compat": "openpi"}


def _published(agent: AgentConfig) -> PublishedQcConfig:
    """The published agent with the sizes and weights of one of ours; its conventions are its own."""
    if isinstance(agent, PublishedQcConfig):
        return replace(agent, gripper=GripperConfig())  # continuous as every other dimension
    # Its image encoders are not ours; what ours has had from the start stays as the experiment has it.
    e = agent.encoder
    return PublishedQcConfig(
        **agent.as_published, image_keys=agent.image_keys, use_state=agent.use_state, language=agent.language,
        lr=agent.lr, encoder=EncoderConfig(features=e.features, latent=e.latent, shift=e.shift),
    )  # fmt: skip


class Pi0Robot(NamedTuple):
    """What a checkpoint's training knew about a robot."""

    cameras: tuple[str, ...]  # `agent.image_keys`: in the order of `agent.pi0.cameras`, of which the last may be absent
    state_dim: int
    action_dim: int
    delta_mask: tuple[int, ...]  # as `normaliser.delta_mask`
    units: Literal["none", "aloha"]  # as `normaliser.robot`

    def normaliser(self, norm_stats: str, *, pi05: bool = False) -> NormaliserConfig:
        """Return the transforms by the statistics in the file `norm_stats`; those of pi0.5 scale by quantiles."""
        scaling: Literal["z_score", "quantiles"] = "quantiles" if pi05 else "z_score"
        return NormaliserConfig(
            actions="openpi", norm_stats=norm_stats, scaling=scaling, delta_mask=self.delta_mask, robot=self.units
        )


PI0_ROBOTS: dict[str, Pi0Robot] = {
    "aloha": Pi0Robot(("cam_high", "cam_left_wrist", "cam_right_wrist"), 14, 14, (6, -1, 6, -1), "aloha"),
    # gym-aloha's Transfer Cube, whose checkpoint has absolute actions.
    "aloha_sim": Pi0Robot(("top",), 14, 14, (), "aloha"),
    # Actions are differences already. Upstream's first pi0_libero subtracts the state once more: (6, -1).
    "libero": Pi0Robot(("image", "wrist_image"), 8, 7, (), "none"),
    # Joint velocities. A fine-tune on joint positions has (7, -1).
    "droid": Pi0Robot(("exterior_image_1_left", "wrist_image_left"), 8, 8, (), "none"),
}
"""By the names of openpi's policies; each camera has its name there."""
