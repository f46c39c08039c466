"""Ranges of the numbers in a robot's file, each with its reason: a limit beyond its range limits nothing."""

from __future__ import annotations

from typing import Dict, NamedTuple, Sequence

import numpy as np

from serl_chunk_robot.drivers.base import DriverSpec
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.robot_file.toml_file import Table


class Range(NamedTuple):
    """From `low` to `high`, both inclusive."""

    low: float
    high: float
    why: str


class Relative(NamedTuple):
    """From `low` to `high` times what a joint can, a key of `yardsticks`."""

    low: float
    high: float
    of: str
    why: str


# Of numbers that mean the same for every robot; "driver", "camera" and "device": options of built-in ones.
RANGES: Dict[str, Range] = {
    "port": Range(1024, 65533, "ports below are the system's, and state, cameras and devices need those after it"),
    "rate": Range(50.0, 500.0, "a slower loop brakes late, and no loop in Python keeps up with a faster one"),
    "tick": Range(0.005, 0.5, "a command is valid for 1.5 ticks, in which a lost controller goes on moving the robot"),
    "effort": Range(1e-3, 1e5, "no motor has more, in Nm, N or mA. Leave it out where there is to be no limit"),
    "grip_effort": Range(1e-3, 1e5, "no gripper has more, in Nm, N or mA. Leave it out where there is to be no limit"),
    "grip_seconds": Range(0.1, 120.0, "a gripper's motor is hot after two minutes in overload"),
    "scale": Range(0.01, 10.0, "first_day is a tenth of evaluating: a larger factor is a slip"),
    "workspace": Range(-10.0, 10.0, "a border further away than any arm reaches, in m, is none"),
    "between_arms": Range(0.0, 1.0, "arms on one table cannot keep a larger distance, in m"),
    "radius": Range(0.0, 0.5, "no link is thicker, in m"),
    "kinematics": Range(-10.0, 10.0, "the arms stand in one cell, in m: are these mm?"),
    "links": Range(-2.0, 2.0, "no link is longer, in m: are these mm?"),
    "yaw": Range(-2 * np.pi, 2 * np.pi, "a turn in rad, not in degrees"),
    "speed": Range(0.01, 1.0, "a share of the profile's velocity, acceleration and jerk"),
    "wait": Range(0.0, 600.0, "a longer wait is for the operator: write wait = 'operator'"),
    "every": Range(1, 10_000, "no run has more episodes between two resets of a kind"),
    "lift": Range(-2.0, 2.0, "no arm lifts its tip further, in m"),
    "height": Range(-2.0, 3.0, "no arm's tip gets there, in m"),
    "pose": Range(-10.0, 10.0, "places in m and turns in rad, not in mm and degrees"),
    "camera.latency": Range(0.0, 1.0, "a picture that is later, in s, shows nothing that one can act on"),
    "camera.rate": Range(1.0, 500.0, "pictures a second: an older one counts as lost, and no camera gives more"),
    "camera.fps": Range(1.0, 500.0, "pictures a second: an older one counts as lost, and no camera gives more"),
    "camera.exposure": Range(1.0, 1e6, "a picture is exposed for less than a second"),
    "camera.white_balance": Range(1000.0, 20_000.0, "the temperature of light, in K"),
    "device.dead_zone": Range(0.0, 0.9, "a share of a stick's way, which has to leave some of it"),
    "device.drive_torque": Range(0.01, 1.0, "a share of the leader's full torque"),
    "device.silence": Range(0.01, 1.0, "s without a report, in which a lost device goes on moving the robot"),
    "device.baud": Range(9600, 4_500_000, "of Dynamixel motors"),
    "driver.lag": Range(0.0, 1.0, "s by which simulated arms follow: the server would stop slower ones"),
    "driver.timeout": Range(0.01, 30.0, "s until an arm that does not answer is a fault"),
    "driver.gripper_lock": Range(0.0, 30.0, "s between two requests to a gripper"),
    "driver.recoveries": Range(0, 1000, "recoveries in a row that did not help"),
}
PROFILE: Dict[str, Relative] = {  # of joints; grippers reach their velocity at once, and press as far as they like
    "velocity": Relative(0.001, np.inf, "velocity", "a joint that is slower does not move"),  # the most: config.checked
    "acceleration": Relative(0.0, 1.0, "acceleration", "one that reaches the driver's velocity within a pass is none"),
    "jerk": Relative(0.0, 1.0, "jerk", "one that reaches such an acceleration within a pass is none"),
    "following": Relative(0.001, 1.0, "range", "a distance larger than the driver's range of the joint is none"),
    "first": Relative(0.001, 0.5, "range", "a first command over half the driver's range of the joint goes anywhere"),
    "overspeed": Relative(0.0, 10.0, "fastest", "a joint that never gets so fast is never stopped"),
    "random": Relative(0.0, 0.5, "range", "no draw of a larger one stays within the driver's range"),
}
STANDS_WITHIN = 2.0  # s, from the profile's velocity
MULTITURN = 25.0  # rad, or m: low and high of what is no gripper


def ranged(table: Table, key: str, default: float, name: str = "") -> float:
    """A number within RANGES[name], by default that of its key. Raises ConfigError with the reason."""
    return table.number(key, default, *RANGES[name or key])


def check_options(table: Table, kind: str) -> None:
    """Compare numbers among the options of a built-in driver, camera or device with RANGES. Raises ConfigError."""
    for key, value in table.values.items():
        if f"{kind}.{key}" in RANGES and type(value) in (int, float):
            ranged(table, key, 0.0, f"{kind}.{key}")


def yardsticks(spec: DriverSpec, acceleration: np.ndarray, jerk: np.ndarray, rate: float) -> Dict[str, np.ndarray]:
    """Return what the joints can, float64[J] each.

    Args:
        acceleration, jerk: of the built-in profiles, float64[J]; those of a file may be as large in any case.
        rate: of the loop, Hz.
    """
    low, high, velocity = (np.array(x, np.float64) for x in (spec.low, spec.high, spec.velocity))
    fastest = np.array(spec.fastest or spec.velocity, np.float64)
    return {
        "velocity": velocity, "range": high - low, "fastest": np.maximum(fastest, velocity),
        "acceleration": np.maximum(acceleration, velocity * rate), "jerk": np.maximum(jerk, velocity * rate**2),
    }  # fmt: skip


def check_relative(table: Table, key: str, values: np.ndarray, spec: DriverSpec, can: Dict[str, np.ndarray]) -> None:
    """Compare numbers of a table with PROFILE[key]. Raises ConfigError with the joint and the reason.

    `values`: float64[J]; `can`: of `yardsticks`.
    """
    low, high, of, why = PROFILE[key]
    least, most = low * can[of], high * can[of]
    if of == "range":
        most = np.where(np.isin(np.arange(len(values)), spec.grippers), np.inf, most)
    wrong = (values < least) | (values > most * (1 + 1e-9))
    if wrong.any():
        j = int(np.argmax(wrong))
        bounds = f"{least[j]:.4g}" + (f" to {most[j]:.4g}" if most[j] < np.inf else " at least")
        hint = "" if isinstance(table.values.get(key), list) else ". Write a list where joints need other numbers"
        raise table.wrong(key, f"{bounds} of joint {j} ({why}){hint}")


def spec_fault(spec: DriverSpec) -> str:
    """Return what is wrong with what a driver says of itself; empty where nothing is."""
    if not len(spec.low) == len(spec.high) == len(spec.velocity) > 0:
        return "spec() needs as many of low, high and velocity, one for each joint"
    if spec.targets not in ("joints", "poses"):
        return f"spec() has targets {spec.targets!r}, expected 'joints' or 'poses'"
    places = [len([i for i in range(*arm) if i not in spec.grippers]) for arm in spec.arms or ((0, len(spec.low)),)]
    if spec.targets == "poses" and set(places) != {6}:
        return f"spec() says poses, and arms of {places} numbers and grippers. Each has 6"
    if len(spec.effort) not in (0, len(spec.low)) or not all(limit > 0 for limit in spec.effort):
        return "spec() needs no limits of effort, or one above 0 for each joint"
    low, high, velocity = (np.array(x, np.float64) for x in (spec.low, spec.high, spec.velocity))
    if not (np.isfinite([low, high, velocity]).all() and (low < high).all() and (velocity > 0).all()):
        return "spec() needs finite numbers, low < high and velocities above 0"
    for name in ("acceleration", "jerk", "fastest", "home"):
        values = np.array(getattr(spec, name), np.float64)
        if len(values) not in (0, len(low)) or not (np.isfinite(values) & ((name == "home") | (values > 0))).all():
            return f"{name} of spec() needs {len(low)} finite numbers" + (" above 0" if name != "home" else "")
    rate, tick, joints = RANGES["rate"], RANGES["tick"], ~np.isin(np.arange(len(low)), spec.grippers)
    if not tick.low <= spec.tick <= tick.high:
        return f"a tick of {spec.tick:g} s, expected {tick.low:g} to {tick.high:g}: {tick.why}"
    if not rate.low <= spec.rate <= rate.high:
        return f"a rate of {spec.rate:g} Hz, expected {rate.low:g} to {rate.high:g}: {rate.why}"
    if spec.rate * spec.tick < 1 - 1e-9:
        return f"a rate of {spec.rate:g} Hz and a tick of {spec.tick:g} s, expected a pass in each tick at least"
    far = joints & (np.maximum(-low, high) > MULTITURN)
    fast = joints & (velocity > spec.rate * (high - low))
    if far.any():
        j = int(np.argmax(far))
        return f"joint {j} from {low[j]:g} to {high[j]:g}, expected {MULTITURN:g} rad or m at most: are these degrees?"
    if fast.any():
        j = int(np.argmax(fast))
        return f"joint {j} at {velocity[j]:g} per second, which crosses its range within a pass"
    return ""


def check_braking(
    table: Table, velocity: np.ndarray, acceleration: np.ndarray, jerk: np.ndarray, grippers: Sequence[int]
) -> None:
    """Refuse rates, float64[J] each, under which a joint brakes for longer than STANDS_WITHIN. Raises ConfigError."""
    full = velocity / acceleration + acceleration / jerk
    seconds = np.where(velocity * jerk < acceleration**2, 2 * np.sqrt(velocity / jerk), full)
    seconds[list(grippers)] = 0.0
    if seconds.max() > STANDS_WITHIN:
        j = int(np.argmax(seconds))
        key = next((key for key in ("jerk", "acceleration", "velocity") if key in table.values), "scale")
        raise ConfigError(
            f"joint {j} would brake from {velocity[j]:g} for {seconds[j]:.3g} s with acceleration {acceleration[j]:g} "
            f"and jerk {jerk[j]:g} in {table.file}, expected {STANDS_WITHIN:g} s at most. Raise acceleration or jerk",
            parameter=table.dotted(key),
        )
