"""Builds the source of human interventions that a configuration names."""

from __future__ import annotations

from pathlib import Path

from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.operator import DEVICES
from serl_chunk.robots.base import InterventionSource, RobotEnv
from serl_chunk.types import ConfigError


def check_intervention(source: str) -> None:
    """Raise ConfigError where `make_intervention` knows no such source, before anything waits or moves."""
    if source in ("none", "scripted") or source.lower() in DEVICES or Path(source).expanduser().is_file():
        return
    raise ConfigError(
        f"not an existing file of recorded interventions (got {source!r}, expected none, scripted, "
        f"{', '.join(DEVICES)} or a file)",
        parameter="actor.intervention",
    )


def make_intervention(source: str, env: RobotEnv, config: ExperimentConfig | None = None) -> InterventionSource | None:
    """Return the intervention source `none`, `scripted` (from `env.make_scripted_human()`), a device of a human
    operator (`config.operator.DEVICES`, as `config.device` describes it) or the path of a recorded one.

    Raises ConfigError for another one, or without a scripted human, DataError where the file is no such recording, and
    DeviceError for a device that cannot be opened.
    """
    check_intervention(source)
    if source == "none":
        return None
    if source.lower() in DEVICES and config is not None:
        from serl_chunk.devices.operator import make_human

        return make_human(config, env)
    if source == "scripted":
        factory = getattr(env, "make_scripted_human", None)
        if factory is None:
            raise ConfigError(
                f"robot {env.robot_spec.name!r} has no scripted human (got {source!r}, expected none or a file)",
                parameter="actor.intervention",
            )
        return factory()
    from serl_chunk.devices.recorded import ReplayedIntervention

    return ReplayedIntervention(Path(source).expanduser(), env.robot_spec)
