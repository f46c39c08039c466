"""`serl-chunk robot dry` and `replay`: the robot's commands that read recorded episodes."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.cli.data.options import add_reading, keys_of, open_any, options_of
from serl_chunk.cli.doctor.checks import require_free
from serl_chunk.cli.robot_dry import Changed, Recorded, dry_run
from serl_chunk.cli.robot_replay import approach, await_go, compared, play
from serl_chunk.data.source import Source
from serl_chunk.types import STATE, ConfigError
from serl_chunk_robot.client.client import Keys, RobotClient
from serl_chunk_robot.robot_file.config import HAIR, load, load_driver

SAME_RATE = 1e-3


def _add_dry(p: argparse.ArgumentParser) -> None:
    _add_common(p)
    p.add_argument("--file", default="robot.toml", metavar="robot.toml", help="of the robot; default: robot.toml")
    p.add_argument("--profile", action="append", metavar="NAME", help="of the file; may be repeated; default: all")
    p.add_argument("--episodes", metavar="0,3,7-12", help="numbers of the episodes; default: all")
    p.add_argument("--lag", type=float, default=0.02, metavar="S", help="of the simulated joints; default: 0.02 s")


def _add_replay(p: argparse.ArgumentParser) -> None:
    _add_common(p)
    p.add_argument("--episode", default="0", metavar="N", help="its number; default: 0")
    p.add_argument("--robot", default="127.0.0.1", metavar="HOST[:PORT]", help="default: 127.0.0.1:5600")
    p.add_argument("--server_keys", metavar="FILE", help="an operator's keys for the robot's server")


def _add_common(p: argparse.ArgumentParser) -> None:
    add_reading(p)
    p.add_argument("--json", metavar="FILE", help="also write the figures there")


def _dry(flags: argparse.Namespace) -> int:
    if not 0 < flags.lag < 10:
        raise ConfigError(f"must lie between 0 and 10 s, got {flags.lag:g}", parameter="lag")
    if flags.json is not None:
        require_free("json", flags.json)
    file = load(flags.file)
    spec = load_driver(file).spec()
    names = flags.profile or list(file.profiles)
    for name in names:
        if name not in file.profiles:
            raise ConfigError(f"{flags.file} has no {name!r}. Valid: {', '.join(file.profiles)}", parameter="profile")
    source = open_any(flags.path, options_of(flags), flags.from_format)
    done = {name: Changed() for name in names}
    low, high = np.array(spec.low) - HAIR, np.array(spec.high) + HAIR
    for episode in _recorded(source, flags.episodes, len(spec.low), spec.tick):
        start = episode.actions[0] if episode.joints is None else episode.joints[0]
        outside = (start < low) | (start > high)
        if outside.any():
            joint = int(np.argmax(outside))
            raise ConfigError(f"{episode.name} begins with joint {joint} at {start[joint]:.3f}, where the robot of "
                              f"{flags.file} cannot be. Are these its absolute joint targets?")  # fmt: skip
        for name, changed in done.items():
            dry_run(episode, file, spec, file.profiles[name].limits, flags.lag, changed)
    for name, changed in done.items():
        print("\n".join(changed.lines(name)))
    if flags.json is not None:
        report = {name: _figures(changed) for name, changed in done.items()}
        Path(flags.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _figures(changed: Changed) -> dict[str, Any]:
    reasons = [{"reason": reason, "joint": joint, "ticks": n} for (reason, joint), n in changed.reasons.items()]
    apart = None if changed.apart is None else changed.apart.tolist()
    return {"ticks": changed.ticks, "changed": changed.changed, "share": changed.share, "reasons": reasons,
            "stops": dict(changed.stops), "apart": apart}  # fmt: skip


def _replay(flags: argparse.Namespace) -> int:
    if flags.json is not None:
        require_free("json", flags.json)
    keys = None if flags.server_keys is None else Keys.of_file(Path(flags.server_keys).expanduser())
    if not flags.episode.isdigit():
        raise ConfigError(f"{flags.episode!r} is no number of an episode", parameter="episode")
    source = open_any(flags.path, options_of(flags), flags.from_format)
    show = functools.partial(print, flush=True)
    with (
        RobotClient(flags.robot, name="replay", role="operator", keys=keys) as operator,
        RobotClient(flags.robot, name="replay", role="controller", keys=keys) as controller,
    ):
        spec = operator.hello()["spec"]
        episode = next(_recorded(source, flags.episode, len(spec["low"]), spec["tick"]))
        approach(operator, controller, episode.actions[0], list(spec["grippers"]), show)
        await_go(controller, show)  # a jog ends in HELD
        show(f"{episode.name}: {len(episode.actions)} actions, {len(episode.actions) * spec['tick']:.1f} s")
        played = play(controller, episode, spec["tick"])
    figures = compared(episode, played, spec["tick"])
    slowed, behind, late = figures["slowed"], 1e3 * figures["behind"], 1e3 * figures["late"]
    print(f"{slowed} of {figures['ticks']} ticks were slowed; the robot is {behind:.0f} ms behind the recorded "
          f"{figures['with']}; commands were late by {late:.1f} ms at most")  # fmt: skip
    for joint, (rms, most) in enumerate(zip(figures["rms"], figures["max"], strict=True)):
        print(f"joint {joint:3}  rms {rms:.4f}  at most {most:.4f}")
    if flags.json is not None:
        Path(flags.json).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def _recorded(source: Source, numbers: str | None, size: int, tick: float) -> Iterator[Recorded]:
    """Read episodes whose actions are targets of `size` joints, one for each `tick` s. Raises ConfigError."""
    if source.hz is not None and abs(source.hz * tick - 1) > SAME_RATE:
        raise ConfigError(f"{source.path}: recorded at {source.hz:g} steps a second, and the robot takes "
                          f"{1 / tick:g}. Only episodes of the robot's own rate can be played")  # fmt: skip
    keys = keys_of(source, numbers)
    if not keys:
        raise ConfigError(f"{source.path}: no episode that could be played ({source.format})")
    for key in keys:
        steps = source.read(key).steps
        actions, state = np.asarray(steps.action, np.float64), steps.observation.get(STATE)
        if actions.shape[1] != size:
            raise ConfigError(f"{source.path}: actions of {actions.shape[1]} numbers, and the robot has {size} joints")
        joints = None if state is None or state.shape[1] < size else np.asarray(state[:, :size], np.float64)
        yield Recorded(f"{source.path}, {key}", actions, joints)


class Command(NamedTuple):
    """A command: adds its flags, runs with them, and describes itself. It raises ConfigError, DataError, RobotError."""

    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    description: str


COMMANDS = {
    "dry": Command(
        _add_dry,
        _dry,
        "Send recorded actions through the limits of each profile in simulated time, and print the share of ticks "
        "that would be changed, by reason and joint. No robot is reached.",
    ),
    "replay": Command(
        _add_replay,
        _replay,
        "Play one recorded episode on the served robot at its rate, after the server's reset and jogs led to its first "
        "target, and compare measured joints with the recorded ones.",
    ),
}
