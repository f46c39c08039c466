"""`serl-chunk memory`: what a learner will need, before it is started."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import get_args

from serl_chunk.cli.process import add_experiment_flags, load_flags
from serl_chunk.config.agents.pi0 import Trainable
from serl_chunk.config.agents.policy import PolicyConfig
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.io import plural
from serl_chunk.logs import quiet_libraries
from serl_chunk.outcomes.robot import spec_of
from serl_chunk.types import ConfigError


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
    from serl_chunk.learner.memory import learner_memory

    config = load_flags(flags)
    spec = spec_of(config)
    found = {name: learner_memory(each, spec, devices) for name, each in _ways(config)}
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
    print(f"{config.name}: agent {config.agent.kind}, {size}, {plural(devices, 'device')}")
    print(f"{'MB of each device':20}", *(f"{name:>13}" for name in found))
    for name, sizes in rows.items():
        print(f"{name:20}", *(f"{nbytes / 1e6:13,.1f}" for nbytes in sizes))
    if limit is not None:
        fit = ["yes" if device.total <= limit * 1e9 else "no" for device in parts]
        print(f"{f'fits into {limit:g} GB':20}", *(f"{each:>13}" for each in fit))
    return 0


def _ways(config: ExperimentConfig) -> Iterator[tuple[str, ExperimentConfig]]:
    """Iterate over (name, experiment): itself, then with the other values of `agent.pi0.trainable` that it can have."""
    agent = config.agent
    if not isinstance(agent, PolicyConfig) or agent.as_pi0 is None:
        yield agent.kind, config
        return
    yield f"{agent.pi0.trainable}*", config
    for trainable in get_args(Trainable):
        if trainable != agent.pi0.trainable:
            try:
                changed = dataclasses.replace(agent, pi0=dataclasses.replace(agent.pi0, trainable=trainable))
                other = dataclasses.replace(config, agent=changed)
            except ConfigError:  # it has no LoRA, or nothing would be trained
                continue
            yield trainable, other
