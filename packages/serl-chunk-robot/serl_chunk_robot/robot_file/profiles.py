"""Profiles: the limits under which a robot moves, built-in ones from what its driver can, and a file's."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from serl_chunk_robot.drivers.base import DriverSpec
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.robot_file.ranges import RANGES, check_braking, check_relative, ranged, yardsticks
from serl_chunk_robot.robot_file.toml_file import Table, unknown
from serl_chunk_robot.safety.motion import GripLimits, Limits, Rates, Workspace

RATES = ("velocity", "acceleration", "jerk")
GRIP = ("grip_effort", "grip_seconds")
KEYS = (*RATES, "following", "first", "overspeed", "low", "high", "workspace", *GRIP, "like", "scale")
WORKSPACE = ("low", "high", "between_arms", "radius")
CAUTIOUS = "first_day"


class Profile(NamedTuple):
    """Limits under a name. `digest`: of all numbers that act, 12 hexadecimal digits."""

    name: str
    limits: Limits
    digest: str


def built_in(spec: DriverSpec) -> Dict[str, Limits]:
    """Derive the profiles that every robot has from what its driver can.

    evaluating and teleop: the driver's velocity, reached in 0.08 s unless the driver says how. exploring: the same,
    with half the acceleration and jerk, as noise needs no more. first_day: a tenth of everything. Grippers reach their
    velocity at once, and may be commanded any distance from where they are: that is their grip.
    """
    low, high, velocity = (np.array(x, np.float64) for x in (spec.low, spec.high, spec.velocity))
    gripper = np.isin(np.arange(len(velocity)), spec.grippers)
    acceleration = np.array(spec.acceleration or velocity / np.where(gripper, 0.001, 0.08), np.float64)
    jerk = np.array(spec.jerk or acceleration / np.where(gripper, 0.001, 0.01), np.float64)
    rates = Rates(velocity, acceleration, jerk)
    overspeed = 1.5 * np.array(spec.fastest or spec.velocity, np.float64)
    following, first = (np.where(gripper, high - low, seconds * velocity) for seconds in (0.1, 0.03))
    evaluating = Limits(low, high, rates, following, first, overspeed)
    exploring = evaluating._replace(rates=Rates(velocity, rates.acceleration / 2, rates.jerk / 2))
    # Measured velocity is noisy, and gravity keeps arms from their targets, however slow they are.
    first_day = _scaled(evaluating, 0.1)._replace(
        following=np.where(gripper, following, following / 2), overspeed=0.2 * overspeed
    )
    return {"first_day": first_day, "exploring": exploring, "evaluating": evaluating, "teleop": evaluating}


def read_profiles(table: Table, spec: DriverSpec, chains: object, rate: Optional[float] = None) -> Dict[str, Profile]:
    """The built-in profiles, and those of a file's table [profile], which replace or are added to them.

    A profile begins with the limits of the one that it is `like` (by default the built-in one of its name, else
    first_day), whose velocity, acceleration, jerk and overspeed are multiplied by `scale`. Its other keys replace.

    Args:
        chains: of the arms' kinematics, in plain numbers; None where the file has none.
        rate: Hz, of the loop; None: the driver's.

    Raises ConfigError: with the key's dotted name.
    """
    first = built_in(spec)
    tables = {name: table.table(name, KEYS) for name in table.values}
    limits: Dict[str, Limits] = {}
    fastest = first["evaluating"].rates
    can = yardsticks(spec, fastest.acceleration, fastest.jerk, rate or spec.rate)

    def read(of: Table, base: Limits) -> Limits:
        limits = _read_limits(of, base, chains, spec.grippers)
        rates = limits.rates._asdict()
        for key in (*RATES, "following", "first", "overspeed"):
            if key in of.values:
                values = rates[key] if key in RATES else getattr(limits, key)
                check_relative(of, key, values, spec, can)
        check_braking(of, *limits.rates, spec.grippers)
        return limits

    def resolve(name: str, wanted_by: Tuple[str, ...]) -> Limits:
        if name not in limits:
            limits[name] = first[name] if name not in tables else replaced(tables[name], name, (*wanted_by, name))
        return limits[name]

    def replaced(of: Table, name: str, wanted_by: Tuple[str, ...]) -> Limits:
        if "like" not in of.values:
            return read(of, first.get(name, first[CAUTIOUS]))
        like = of.text("like")
        if like in wanted_by:
            raise of.wrong("like", "a profile that is not like this one itself")
        if like not in first and like not in tables:
            what = f"unknown profile ({like!r} in {of.file})"
            raise unknown(of.dotted("like"), like, [*first, *tables], what)
        return read(of, resolve(like, wanted_by))

    names = dict.fromkeys([*first, *tables])
    return {name: Profile(name, each, _digest(each, chains)) for name in names for each in [resolve(name, ())]}


def _scaled(limits: Limits, scale: float) -> Limits:
    return limits._replace(rates=Rates(*(scale * rate for rate in limits.rates)), overspeed=scale * limits.overspeed)


def _read_limits(table: Table, base: Limits, chains: object, grippers: Sequence[int]) -> Limits:
    size = len(base.low)
    base = _scaled(base, ranged(table, "scale", 1.0))
    given: Dict[str, Any] = {key: table.numbers(key, size, sign=1) for key in (*RATES, "following", "first")}
    rates = Rates(*(was if given[key] is None else given.pop(key) for key, was in zip(RATES, base.rates)))
    given.update({key: table.numbers(key, size) for key in ("low", "high")})
    given["overspeed"] = table.numbers("overspeed", size, sign=1)
    if given["overspeed"] is None:
        given["overspeed"] = base.overspeed * rates.velocity / base.rates.velocity
    elif (given["overspeed"] <= rates.velocity).any():
        raise table.wrong("overspeed", f"more than the profile's velocity, {rates.velocity.tolist()}")
    replace = {key: value for key, value in given.items() if value is not None}
    limits = base._replace(rates=rates, grip=_read_grip(table, base, list(grippers)), **replace)
    if (limits.low >= limits.high).any():
        joint = int(np.argmax(limits.low >= limits.high))
        key = "low" if "low" in replace else "high"
        raise table.wrong(key, f"low below high (joint {joint}: {limits.low[joint]:g} and {limits.high[joint]:g})")
    if "workspace" not in table.values:
        return limits
    if chains is None:
        what = f"needs the arms' kinematics, and {table.file} has no table [kinematics]. Add it."
        raise ConfigError(what, parameter=table.dotted("workspace"))
    space = table.table("workspace", WORKSPACE)
    low, high = (space.vector(key, 3, RANGES["workspace"]) for key in ("low", "high"))
    if (low >= high).any():
        raise space.wrong("high", f"above low, {low.tolist()}")
    return limits._replace(
        workspace=Workspace(low, high, ranged(space, "between_arms", 0.0), ranged(space, "radius", 0.0))
    )


def _read_grip(table: Table, base: Limits, grippers: List[int]) -> Optional[GripLimits]:
    """Limits of the grippers' effort: the base's where the table has none."""
    if not any(key in table.values for key in GRIP):
        return base.grip
    if not grippers:
        key = next(key for key in GRIP if key in table.values)
        raise table.wrong(key, "no such key: the driver has no gripper")
    grip = base.grip or GripLimits(np.full(len(base.low), np.inf))
    given = table.numbers("grip_effort", len(grippers), sign=1, within=RANGES["grip_effort"])
    effort = grip.effort.copy()
    if given is not None:
        effort[grippers] = given
    elif base.grip is None:
        raise table.wrong("grip_effort", "the effort that grip_seconds is of")
    return GripLimits(effort, ranged(table, "grip_seconds", grip.seconds))


def _digest(limits: Limits, chains: object) -> str:
    acts = [limits, chains if limits.workspace is not None else None]
    text = json.dumps(acts, default=lambda array: array.tolist(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
