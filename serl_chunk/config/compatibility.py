"""Settings that learner and actor must share before records and parameters pass between them: the contract."""

from __future__ import annotations

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import as_text, leaves
from serl_chunk.types import RobotSpec

SETTINGS = {
    "horizon": "chunk.horizon",
    "execute_steps": "chunk.execute_steps",
    "return_steps": "chunk.return_steps",
    "delay_ticks": "actor.delay_ticks",
    "actions": "normaliser.actions",
}
"""Fields of a contract -> the setting whose value they are. A field with a dot is the setting's path itself."""


def affects_acting(config: ExperimentConfig, path: str) -> bool:
    """Whether the setting `path` decides how a checkpoint acts where the shapes of its parameters fit.

    Every setting of a robot does, except those of its scripted human; see `Setting.acts`.
    """
    unknown = "derived" if path.startswith("robot.") else ""
    return next((leaf.acts for leaf in leaves(config) if leaf.path == path), unknown) in ("value", "derived")


def contract(
    config: ExperimentConfig, spec: RobotSpec, network: str, *, base: str = "", tokens: str = ""
) -> dict[str, str]:
    """Named values that both sides must share; the handshake names those that differ.

    `network` is the agent's `network_shape`, `base` its `base_digest`, `tokens` the digest of its tokenizer
    (`data.prompts.tokens_digest`). Settings that this agent does not have or does not use are left out.
    """
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
        "network": network,
    }
    # Networks of equal shape whose outputs mean other values.
    if config.value_range is not None:
        named["critic"] = "bounded by {:g} to {:g}".format(*config.value_range)
    if base:
        named["base"] = base
    if config.agent.image_keys:  # an actor records frames where windows end
        named["return_steps"] = str(config.chunk.returned)
    unused: tuple[str, ...] = () if config.agent.gripper.composition == "learned" else ("agent.gripper.",)
    if config.agent.language.reads:
        named["tokens"] = tokens
    else:
        unused += ("agent.language.",)
    if not config.agent.iterates:
        unused += (config.group.PATH,)
    compared = (leaf for leaf in leaves(config) if leaf.acts == "value" and not leaf.path.startswith(unused))
    return named | {leaf.path: as_text(leaf.value) for leaf in compared}


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
