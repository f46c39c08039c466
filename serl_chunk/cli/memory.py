"""`serl-chunk memory`: what a learner will need, before it is started."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from serl_chunk.cli.process import add_experiment_flags, load_flags
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.io import plural
from serl_chunk.logs import quiet_libraries
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.types import RobotSpec

if TYPE_CHECKING:
    from serl_chunk.learner.memory import LearnerMemory


def memory_flags(p: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    p.description = (
        "Show the memory that a learner needs on its devices and in its host, of pi0 for each agent.pi0.trainable. "
        "States are exact, activations an estimate. Nothing is allocated."
    )
    p.add_argument("--exp_name", required=True, help="the experiment")
    p.add_argument("--devices", type=int, default=1, metavar="N", help="devices that share it (default: 1)")
    p.add_argument("--device_memory", type=float, metavar="GB", help="say what fits into this much of each device")
    add_experiment_flags(p)


def memory_command(flags: argparse.Namespace) -> int:
    """Print the memory by its parts, a column for each set of parameters that can be trained. Raises ConfigError."""
    limit, devices = flags.device_memory, flags.devices
    require(limit is None or limit > 0, "device_memory", f"must be above 0 GB, got {limit}")
    quiet_libraries()
    config = load_flags(flags)
    show_memory(config, spec_of(config), None if limit is None else limit * 1e9, devices)
    return 0


def show_memory(config: ExperimentConfig, spec: RobotSpec, limit: float | None, devices: int = 1) -> LearnerMemory:
    """Print the table, with what fits into `limit` bytes of each device; return the memory of the experiment itself."""
    from serl_chunk.learner.memory import learner_memory, ways

    found = {name: learner_memory(each, spec, devices) for name, each in ways(config)}
    parts = [memory.device for memory in found.values()]
    rows: dict[str, list[int]] = {
        **{name: [getattr(device, name) for device in parts] for name in parts[0]._fields},
        "at most": [device.total for device in parts],
        "a snapshot": [memory.snapshot for memory in found.values()],
        "a checkpoint": [memory.checkpoint for memory in found.values()],
        "the host's replay": [memory.replay for memory in found.values()],
    }
    size = f"{config.learner.batch_size} windows an update"
    if config.agent.iterates:
        size = f"{config.group.minibatch} decisions a gradient step"
    names = [f"{name}*" if len(found) > 1 and not i else name for i, name in enumerate(found)]
    print(f"{config.name}: agent {config.agent.kind}, {size}, {plural(devices, 'device')}")
    print(f"{'MB of each device':20}", *(f"{name:>13}" for name in names))
    for name, sizes in rows.items():
        print(f"{name:20}", *(f"{nbytes / 1e6:13,.1f}" for nbytes in sizes))
    if limit is not None:
        fit = ["yes" if device.total <= limit else "no" for device in parts]
        print(f"{f'fits into {limit / 1e9:.4g} GB':20}", *(f"{each:>13}" for each in fit))
    return next(iter(found.values()))
