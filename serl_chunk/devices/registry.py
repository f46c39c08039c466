"""Builds the source of human interventions that a configuration names."""

from __future__ import annotations

from pathlib import Path

from serl_chunk.robots.base import InterventionSource, RobotEnv
from serl_chunk.types import ConfigError


def make_intervention(source: str, env: RobotEnv) -> InterventionSource | None:
    """The intervention source `none`, `scripted` (from `env.make_scripted_human()`) or the path of a recorded one.

    Raises ConfigError where it is none of these or `env` has no scripted human, and DataError where the file is no such
    recording.
    """
    if source == "none":
        return None
    if source == "scripted":
        factory = getattr(env, "make_scripted_human", None)
        if factory is None:
            raise ConfigError(
                f"robot {env.robot_spec.name!r} has no scripted human; use --config.actor.intervention=none or a file"
            )
        return factory()
    path = Path(source).expanduser()
    if path.is_file():
        from serl_chunk.devices.recorded import ReplayedIntervention

        return ReplayedIntervention(path, env.robot_spec)
    raise ConfigError(
        f"actor.intervention={source!r} is neither none, scripted, nor an existing file of recorded interventions"
    )
