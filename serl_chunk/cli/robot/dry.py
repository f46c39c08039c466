"""`serl-chunk robot dry`: recorded actions through each profile's gate and loop, in simulated time, without a robot."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.cli.data.options import add_reading, keys_of, open_any, options_of
from serl_chunk.cli.doctor.checks import require_free
from serl_chunk.config.fields import require
from serl_chunk.data.source import Source
from serl_chunk.types import STATE, ConfigError
from serl_chunk_robot.control.loop import CATCHING_UP, RobotLoop
from serl_chunk_robot.drivers.base import DriverSpec
from serl_chunk_robot.drivers.fake import FakeArms
from serl_chunk_robot.robot_file.config import HAIR, RobotFile, load, load_driver
from serl_chunk_robot.safety.gate import Command, Gate
from serl_chunk_robot.safety.measured import Measured
from serl_chunk_robot.safety.motion import Limits
from serl_chunk_robot.safety.table import OPERATOR, RUN

STANDS = 5  # passes before the first command
NO_JOINT = -1  # of a reason that is of whole arms


SAME_RATE = 1e-3


class Recorded(NamedTuple):
    """An episode's targets and joints."""

    name: str
    actions: np.ndarray  # float64[T, J]
    joints: np.ndarray | None  # float64[T, J], measured before each action


def add_common(p: argparse.ArgumentParser) -> None:
    """Add the flags of the commands that read episodes."""
    add_reading(p)
    p.add_argument("--json", metavar="FILE", help="also write the figures there")


def recorded(source: Source, numbers: str | None, size: int, tick: float) -> Iterator[Recorded]:
    """Read episodes whose actions are targets of `size` joints, one for each `tick` s. Raises ConfigError."""
    if source.hz is not None and abs(source.hz * tick - 1) > SAME_RATE:
        raise ConfigError(
            f"{source.path}: recorded at {source.hz:g} steps a second, and the robot takes "
            f"{1 / tick:g}. Only episodes of the robot's own rate can be played"
        )
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


def dry_flags(p: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    p.description = (
        "Send recorded actions through the limits of each profile in simulated time, and print the share of ticks "
        "that would be changed, by reason and joint. No robot is reached."
    )
    add_common(p)
    p.add_argument("--file", default="robot.toml", metavar="robot.toml", help="of the robot; default: robot.toml")
    p.add_argument("--profile", action="append", metavar="NAME", help="of the file; may be repeated; default: all")
    p.add_argument("--episodes", metavar="0,3,7-12", help="numbers of the episodes; default: all")
    p.add_argument("--lag", type=float, default=0.02, metavar="S", help="of the simulated joints; default: 0.02 s")


def dry_command(flags: argparse.Namespace) -> int:
    """Print what each profile would change. Raises ConfigError, DataError and RobotError."""
    require(0 < flags.lag < 10, "lag", f"must lie between 0 and 10 s, got {flags.lag:g}")
    if flags.json is not None:
        require_free("json", flags.json)
    require(Path(flags.file).is_file(), "file", f"{flags.file}: no such file. Give the path of the robot's TOML file")
    file = load(flags.file)
    spec = load_driver(file).spec()
    names = flags.profile or list(file.profiles)
    for name in names:
        require(name in file.profiles, "profile", f"{flags.file} has no {name!r}. Valid: {', '.join(file.profiles)}")
    source = open_any(flags.path, options_of(flags), flags.from_format)
    done = {name: Changed() for name in names}
    low, high = np.array(spec.low) - HAIR, np.array(spec.high) + HAIR
    for episode in recorded(source, flags.episodes, len(spec.low), spec.tick):
        start = episode.actions[0] if episode.joints is None else episode.joints[0]
        outside = (start < low) | (start > high)
        if outside.any():
            joint = int(np.argmax(outside))
            raise ConfigError(
                f"{episode.name} begins with joint {joint} at {start[joint]:.3f}, where the robot of "
                f"{flags.file} cannot be. Are these its absolute joint targets?"
            )
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


@dataclasses.dataclass
class Changed:
    """Ticks that one profile would change."""

    ticks: int = 0
    changed: int = 0
    reasons: Counter[tuple[str, int]] = dataclasses.field(default_factory=Counter)  # reason, joint -> ticks
    stops: Counter[str] = dataclasses.field(default_factory=Counter)  # word -> episodes
    # Largest distance of the set point from its target at the end of a tick, float64[J].
    apart: np.ndarray | None = None

    @property
    def share(self) -> float:
        return self.changed / max(self.ticks, 1)

    def lines(self, name: str) -> list[str]:
        out = [f"{name:12} changes {100 * self.share:5.1f} % of {self.ticks} ticks"]
        for (reason, joint), n in sorted(self.reasons.items(), key=lambda item: -item[1]):
            where = "all joints" if joint == NO_JOINT else f"joint {joint}"
            out.append(f"{'':14}{100 * n / max(self.ticks, 1):5.1f} %  {reason:12} {where}")
        out += [f"{'':14}stops {n} episodes: {word}" for word, n in self.stops.items()]
        if self.apart is not None and self.changed:
            joint = int(np.argmax(self.apart))
            out.append(f"{'':14}furthest from a target at its tick's end: joint {joint}, {self.apart[joint]:.3f}")
        return out


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def dry_run(episode: Recorded, file: RobotFile, spec: DriverSpec, limits: Limits, lag: float, done: Changed) -> None:
    """Send one episode's actions to simulated arms under `limits`, and count in `done` what is changed.

    Args:
        file, spec: of the robot.
        lag: seconds in which the simulated joints make 63 % of the way to their set points.
    """
    clock, dt = _Clock(), 1.0 / (file.rate or spec.rate)
    low, high, velocity = (np.array(x, np.float64) for x in (spec.low, spec.high, spec.velocity))
    start = episode.actions[0] if episode.joints is None else episode.joints[0]
    arms = FakeArms(spec._replace(state=()), start, lag=lag)  # joints alone are simulated
    arms.connect(clock)
    loop = RobotLoop(arms, Gate(limits, dt, file.arms), measured=Measured(low - HAIR, high + HAIR, velocity),
                     tick=spec.tick, clock=clock)  # fmt: skip
    for k in range(2 * STANDS):
        clock.now += dt
        loop.run_pass(clock.now)
        if k == STANDS:
            loop.request("clear", OPERATOR, "dry", clock.now)
            loop.request("go", OPERATOR, "dry", clock.now)  # of simulated arms in this process
    loop.request("arm", OPERATOR, "dry", clock.now)
    needs, apart, joint = _demands(episode.actions, spec.tick, limits), np.zeros(len(low)), NO_JOINT
    began = clock.now
    for k, target in enumerate(episode.actions):
        reason = loop.command(Command(target, k, loop.machine.generation), clock.now)
        place = arms.target
        while clock.now < began + (k + 1) * spec.tick - dt / 2:
            clock.now += dt
            status = loop.run_pass(clock.now)
            if not reason or reason == CATCHING_UP:
                reason = status.reason or reason  # a target beyond a limit is cut with factor 1
        done.ticks += 1
        if loop.machine.state != RUN:
            done.stops[f"{loop.machine.word} ({reason})" if reason else loop.machine.word] += 1
            left = len(episode.actions) - k - 1
            done.ticks, done.changed = done.ticks + left, done.changed + left + 1
            done.reasons["stopped", NO_JOINT] += left + 1
            break
        apart = np.maximum(apart, np.abs(arms.target - target))
        if reason:
            done.changed += 1
            if reason == CATCHING_UP:  # with what the targets needed too much of, now or before
                reason, joint = next(
                    ((name, int(np.argmax(need[k]))) for name, need in needs.items() if need[k].max() > 1),
                    (reason, joint),
                )
            elif reason == "following":
                joint = int(np.argmax(np.abs(arms.target - arms.q) / limits.following))
            elif reason == "first":
                joint = int(np.argmax(np.abs(target - place) / limits.first))
            else:
                joint = int(np.argmax(needs[reason][k])) if reason in needs else NO_JOINT
            done.reasons[reason, joint] += 1
    done.apart = apart if done.apart is None else np.maximum(done.apart, apart)


def _demands(actions: np.ndarray, tick: float, limits: Limits) -> dict[str, np.ndarray]:
    """What the targets need of each limit, as a share of it, float64[T, J] each; above 1 is too much."""
    rates = limits.rates
    padded = np.concatenate([np.repeat(actions[:1], 3, axis=0), actions])
    shares = {
        name: np.abs(np.diff(padded, n, axis=0))[-len(actions) :] / tick**n / rate
        for n, (name, rate) in enumerate(zip(("velocity", "acceleration", "jerk"), rates, strict=True), 1)
    }
    outside = np.maximum(limits.low - actions, actions - limits.high)
    return {"limit": 1 + outside, **shares}
