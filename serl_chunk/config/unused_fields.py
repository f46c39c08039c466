"""Settings that nothing reads as the rest of an experiment stands, checked where the user gives them by name.

An experiment's file may set the number of bins for users who choose a critic of bins. A number of bins on the command
line is expected to have an effect; where it has none, a message names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from serl_chunk.config.agents import AcfqlConfig, BcConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.types import ConfigError


class FieldCondition(NamedTuple):
    """Fields that count only while another one is as it must be."""

    group: str  # the fields' path without their names
    names: tuple[str, ...]  # () for all of the group
    read: Callable[[ExperimentConfig], bool]
    needs: str  # what makes them count

    def covers(self, path: str) -> bool:
        """Whether `path` is one of the fields."""
        group, _, name = path.rpartition(".")
        return group == self.group and (not self.names or name in self.names)


def _at(config: ExperimentConfig, path: str) -> Any:
    """The value at a dotted path, which exists."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _cameras(config: ExperimentConfig) -> bool:
    return bool(config.agent.image_keys)


def _critic(config: ExperimentConfig) -> bool:
    return not isinstance(config.agent, BcConfig)


def _or_none(path: str, read: Callable[[ExperimentConfig], bool]) -> Callable[[ExperimentConfig], bool]:
    """As `read`, and a 0, which asks for nothing, is read by all."""
    return lambda c: _at(c, path) == 0 or read(c)


def _best_of_n(config: ExperimentConfig) -> bool:
    return not isinstance(config.agent, AcfqlConfig) or config.agent.actor_type == "best-of-n"


def _of_policy(target: str) -> Callable[[ExperimentConfig], bool]:
    """Whether an acfql's critic bootstraps in that way; other agents have the fields for reasons of their own."""
    return lambda c: not isinstance(c.agent, AcfqlConfig) or c.agent.target == target


_HAS_CRITIC = "an agent with a critic (acfql or acrlpd)"
_CONDITIONS = (
    FieldCondition("agent.critic", (), _critic, _HAS_CRITIC),
    FieldCondition("agent", ("choose_by", "choose_std", "acting_critic", "pretrain_candidates"), _critic, _HAS_CRITIC),
    FieldCondition("learner", ("critic_pretrain_steps",),
                   _or_none("learner.critic_pretrain_steps", _critic), _HAS_CRITIC),
    FieldCondition("learner", ("critic_warmup_steps",), _or_none("learner.critic_warmup_steps", _critic), _HAS_CRITIC),
    FieldCondition("agent.gripper", ("penalty", "mask_unreachable", "tau", "loss", "critic_sees_gripper"),
                   _critic, _HAS_CRITIC),
    FieldCondition("agent.encoder", ("trained_by",), lambda c: _cameras(c) or _at(c, "agent.encoder.state_latent") > 0,
                   "cameras in agent.image_keys, or agent.encoder.state_latent above 0"),
    FieldCondition("agent.encoder", ("state_latent",),
                   _or_none("agent.encoder.state_latent", lambda c: c.agent.use_state),
                   "agent.use_state=True"),
    FieldCondition("agent.critic", ("bins", "sigma_bins"), lambda c: c.agent.critic.loss == "hl_gauss",
                   "agent.critic.loss=hl_gauss"),
    FieldCondition("agent.critic", ("value_low", "value_high", "initial_logit"),
                   lambda c: c.agent.critic.loss != "squared",
                   "agent.critic.loss=bounded or hl_gauss"),
    FieldCondition("agent.encoder",
                   ("kind", "features", "pooling", "latent", "share_cameras", "frozen_backbone", "shift"),
                   _cameras, "cameras in agent.image_keys"),
    FieldCondition("agent.encoder", ("features",), lambda c: c.agent.encoder.kind != "resnet10",
                   "agent.encoder.kind=conv or impala (ResNet-10 has channels of its own)"),
    FieldCondition("agent.flow", (), lambda c: not isinstance(c.agent, BcConfig) or c.agent.policy == "flow",
                   "agent.policy=flow (the Gaussian's layers are agent.hidden)"),
    FieldCondition("agent", ("hidden",), lambda c: not isinstance(c.agent, BcConfig) or c.agent.policy == "gaussian",
                   "agent.policy=gaussian (the flow's layers are agent.flow.hidden)"),
    FieldCondition("agent.flow", ("train_delay_max",), lambda c: _at(c, "agent.flow.train_delay") == "sampled",
                   "agent.flow.train_delay=sampled"),
    FieldCondition("agent.flow", ("fourier_dim",), lambda c: _at(c, "agent.flow.time") == "fourier",
                   "agent.flow.time=fourier"),
    FieldCondition("agent", ("alpha", "normalise_q"), lambda c: getattr(c.agent, "actor_type", "") == "distill-ddpg",
                   "agent.actor_type=distill-ddpg"),
    FieldCondition("agent", ("expectile",), _of_policy("expectile"), "agent.target=expectile"),
    FieldCondition("agent", ("target_candidates", "target_flow_steps"), _of_policy("policy"), "agent.target=policy"),
    FieldCondition("agent", ("target_candidates", "target_flow_steps"), _best_of_n, "agent.actor_type=best-of-n"),
    FieldCondition("agent", ("prefix_expectile",), lambda c: c.agent.prefix_critic, "agent.prefix_critic=True"),
    FieldCondition("agent.improve", ("top", "rate", "radius"), lambda c: _at(c, "agent.improve.steps") > 0,
                   "agent.improve.steps above 0"),
    FieldCondition("agent.improve", ("candidates",), lambda c: _at(c, "agent.improve.imitate") > 0,
                   "agent.improve.imitate above 0"),
    FieldCondition("agent.gripper",
                   ("joint", "epsilon", "mask_unreachable", "hidden", "lr", "tau", "loss", "critic_sees_gripper"),
                   lambda c: c.agent.gripper.composition == "learned",
                   "agent.gripper.choices, or a learned-gripper setup_mode"),
    FieldCondition("replay", ("image_capacity", "max_image_age"), _cameras, "cameras in agent.image_keys"),
    FieldCondition("replay", ("frame_cache_bytes",), _or_none("replay.frame_cache_bytes", _cameras),
                   "cameras in agent.image_keys"),
    FieldCondition("replay", ("frame_cache_bytes",),
                   _or_none("replay.frame_cache_bytes", lambda c: not c.agent.encoder.cache_features),
                   "agent.encoder.cache_features=False (features stand for decoded frames)"),
    FieldCondition("replay", ("exclude_before_takeover",),
                   lambda c: c.agent.bc_on == "+successes", "agent.bc_on=+successes"),
    FieldCondition("actor", ("frames",), _cameras, "cameras in agent.image_keys"),
    FieldCondition("actor", ("max_human_ticks",), lambda c: c.actor.intervention != "none", "actor.intervention"),
    FieldCondition("actor", ("inference",), lambda c: c.actor.clock == "realtime", "actor.clock=realtime"),
    FieldCondition("robot.scripted_human", (), lambda c: c.actor.intervention == "scripted",
                   "actor.intervention=scripted"),
)  # fmt: skip


def check_unused(config: ExperimentConfig, paths: Iterable[str]) -> None:
    """Raise ConfigError for the first of the fields `paths` (dotted, such as "agent.critic.bins") that is not read."""
    for path in paths:
        for condition in _CONDITIONS:
            if condition.covers(path) and not condition.read(config):
                raise ConfigError(
                    f"--config.{path}={_text(_at(config, path))} would not be read: it needs {condition.needs}. Set "
                    "that too, or leave it out"
                )


def _text(value: object) -> str:
    """A field's value as it is written on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
