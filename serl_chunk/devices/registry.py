"""Builds the source of human interventions that a configuration names."""

from __future__ import annotations

from pathlib import Path

from serl_chunk.robots.base import InterventionSource, RobotEnv
from serl_chunk.types import ConfigError


def make_intervention(source: str, env: RobotEnv) -> InterventionSource | None:
    """Return the intervention source `none`, `scripted` (from `env.make_scripted_human()`) or the path of a recorded
    one.

    Raises ConfigError for another one, or without a scripted human, and DataError where the file is no such recording.
    """
    if source == "none":
        return None
    if source == "scripted":
        factory = getattr(env, "make_scripted_human", None)
        if factory is None:
            raise ConfigError(
                f"robot {env.robot_spec.name!r} has no scripted human (got {source!r}, expected none or a file)",
                parameter="actor.intervention",
            )
        return factory()
    path = Path(source).expanduser()
    if path.is_file():
        from serl_chunk.devices.recorded import ReplayedIntervention

        return ReplayedIntervention(path, env.robot_spec)
    raise ConfigError(
        f"not an existing file of recorded interventions (got {source!r}, expected none, scripted or a file)",
        parameter="actor.intervention",
    )
