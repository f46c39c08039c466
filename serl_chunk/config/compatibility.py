"""What learner and actor must agree on before records and parameters pass between them: the handshake's contract."""

from __future__ import annotations

from typing import Any

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.types import RobotSpec

# Settings that an actor acts by and that no shape of the travelling parameters tells, as users write them. An actor
# with other ones would not execute the policy that the learner evaluates and trains from.
ACTING_FIELDS = (
    "agent.image_keys",
    "agent.candidates",
    "agent.choose_by",
    "agent.choose_std",
    "agent.exploration_knots",
    "agent.replan_spread",
    "agent.prefix_lengths",
    "agent.critic.activation",
    "agent.critic.layer_norm",
    "agent.flow.steps",
    "agent.flow.noise_low",
    "agent.flow.activation",
    "agent.flow.time",
    "agent.flow.train_delay",
    "agent.improve.steps",
    "agent.improve.top",
    "agent.improve.rate",
    "agent.improve.radius",
    "agent.log_std_min",
    "agent.gripper.epsilon",
    "agent.gripper.loss",
    "reward.failure_reward",
    "learner.random_steps",
    "actor.clock",
    "actor.adaptive_execution",
)


# What a checkpoint acts by beside these, where the shapes of its parameters fit.
_OTHER_ACTING_FIELDS = (
    "chunk.horizon", "chunk.execute_steps", "actor.delay_ticks", "actor.inference",
    "agent.critic.loss", "agent.critic.value_low", "agent.critic.value_high", "agent.critic.sigma_bins",
    "agent.gripper.choices", "agent.gripper.mode", "agent.gripper.fixed_value", "agent.gripper.setup_mode",
    "agent.gripper.joint", "agent.gripper.hold_steps",
)  # fmt: skip


def affects_acting(path: str) -> bool:
    """Whether the setting `path` decides how a checkpoint acts; others only decide how it was trained.

    Every setting of a robot does, except those of its scripted human.
    """
    return (
        path in ACTING_FIELDS
        or path in _OTHER_ACTING_FIELDS
        or (path.startswith("robot.") and not path.startswith("robot.scripted_human."))
    )


def contract(config: ExperimentConfig, spec: RobotSpec, network: str) -> dict[str, str]:
    """Named values that both sides must share; the handshake names whatever differs.

    `network` is the agent's `network_shape`. Settings of `ACTING_FIELDS` that this agent does not have or does not look
    at are left out.
    """
    critic = config.agent.critic
    # Networks of equal shape whose outputs mean other values.
    critic_values = "squared"
    if critic.loss != "squared":
        critic_values = f"{critic.loss} {critic.value_low:g} to {critic.value_high:g}"
    if critic.loss == "hl_gauss":  # the bins reach beyond the range by as much as the targets' Gaussian is wide
        critic_values += f", sigma {critic.sigma_bins:g} bins"
    named = {
        "experiment": config.name,
        "robot": spec.name,
        "state_dim": str(spec.state_dim),
        "action_dim": str(spec.action_dim),
        "robot_specs": spec.digest(),
        "control_hz": f"{spec.control_hz:g}",
        "horizon": str(config.chunk.horizon),
        "execute_steps": str(config.chunk.executed),
        "delay_ticks": str(config.actor.delay_ticks),
        "actions": config.normaliser.actions,
        "agent": config.agent.kind + gripper_in_words(config),
        "critic": critic_values,
        "network": network,
    }
    if config.agent.image_keys:  # an actor records frames where windows end
        named["return_steps"] = str(config.chunk.returned)
    return named | {path: _text(value) for path in ACTING_FIELDS if (value := _read(config, path)) is not _ABSENT}


_ABSENT = object()


def _read(config: ExperimentConfig, path: str) -> Any:
    """The setting; _ABSENT where this experiment's agent does not have it or does not look at it."""
    agent = config.agent
    if path.startswith("agent.gripper.") and agent.gripper.composition != "learned":
        return _ABSENT
    if path.startswith("agent.improve.") and path != "agent.improve.steps" and not _read(config, "agent.improve.steps"):
        return _ABSENT
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name, _ABSENT)
    return value


def _text(value: Any) -> str:
    """A setting as a user writes it."""
    if value is None:
        return "none"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def gripper_in_words(config: ExperimentConfig) -> str:
    """What both sides must agree on about grippers; empty where they are continuous."""
    gripper = config.agent.gripper
    if gripper.composition == "continuous":
        return ""
    if gripper.composition == "fixed":
        return f", grippers fixed ({'as at reset' if gripper.fixed_value is None else f'{gripper.fixed_value:g}'})"
    values = ", ".join(f"{v:g}" for v in gripper.values)
    together = "jointly" if gripper.joint else "each"
    return f", grippers {together} of ({values}) for {gripper.hold_steps or config.chunk.executed} ticks"
