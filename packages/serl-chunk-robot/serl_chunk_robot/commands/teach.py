"""`robot teach`: limits of the joints, from the places to which a person leads the arms while they have no torque."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import numpy as np

from serl_chunk_robot.client.client import RobotClient, RobotError
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.robot_file.config import RobotFile, load
from serl_chunk_robot.robot_file.profiles import built_in
from serl_chunk_robot.robot_file.toml_file import create

LEAST = 0.2  # rad that a joint was moved by, to be taught
STALE = 1.0  # s without a sample that is believed
SHOWN = 5.0  # s between two lines


def extremes(client: RobotClient, seconds: float, show: Callable[[str], None] = print) -> Tuple[np.ndarray, np.ndarray]:
    """Record the extremes of each joint for so many seconds; returns low and high, float64[J].

    Raises RobotError: the robot is not STOPPED, or has torque, at any moment; or its state is not believed any more.
    """
    state = _without_torque(client.next_state())
    low, high = state["q"].copy(), state["q"].copy()
    began = shown = fresh = state["moment"]
    stamp = state["stamp"]
    show(f"move each joint to both ends of where it may be, within {seconds:g} s: torque is off")
    while state["moment"] - began < seconds:
        state = _without_torque(client.next_state())
        low, high = np.minimum(low, state["q"]), np.maximum(high, state["q"])
        if state["stamp"] != stamp:
            stamp, fresh = state["stamp"], state["moment"]
        if state["moment"] - fresh > STALE:
            why = state["causes"].get("doubtful", "no new sample came")
            raise RobotError(
                f"the measured state is not believed ({why}). Clear the robot, switch torque off, and "
                "move the arms more slowly."
            )
        if state["moment"] - shown > SHOWN:
            shown = state["moment"]
            left = ", ".join(str(j) for j in range(len(low)) if high[j] - low[j] < LEAST) or "none"
            show(f"{seconds - (shown - began):.0f} s left; joints that hardly moved: {left}")
    return low, high


def _without_torque(state: Dict[str, Any]) -> Dict[str, Any]:
    if state["state"] != "STOPPED" or state["torque"] is not False or state["q"] is None:
        torque = {None: "unknown", True: "on", False: "off"}[state["torque"]]
        raise RobotError(
            f"the robot is in {state['state']} with torque {torque}, and is taught by hand in STOPPED with torque off. "
            "Park it, hold its arms, and run `robot torque-off`."
        )
    return state


def taught(
    file: RobotFile, spec: Any, low: np.ndarray, high: np.ndarray, margin: float
) -> Tuple[np.ndarray, np.ndarray, List[int]]:
    """Turn extremes into limits: `margin` rad inside of them, none for grippers, and within what the driver can.

    Returns low and high, float64[J], and the joints that hardly moved: theirs are the driver's. Raises ConfigError: no
    joint moved.
    """
    can_low, can_high = np.array(spec.low, np.float64), np.array(spec.high, np.float64)
    gripper = np.isin(np.arange(len(low)), spec.grippers)
    inside = np.where(gripper, 0.0, margin)
    moved = (high - low >= np.where(gripper, 0.2 * (can_high - can_low), LEAST)) & (high - low > 3 * inside)
    if not moved.any():
        raise ConfigError(f"no joint was moved by {LEAST:g} rad. Move each one to both ends.", parameter="teach")
    new_low = np.where(moved, np.maximum(low + inside, can_low), can_low)
    new_high = np.where(moved, np.minimum(high - inside, can_high), can_high)
    return new_low, new_high, [int(j) for j in np.flatnonzero(~moved)]


def write_taught(file: RobotFile, spec: Any, low: np.ndarray, high: np.ndarray, out: Path) -> List[str]:
    """Write a copy of a robot's file, in which the profiles that every robot has have these limits.

    Profiles of the file that are `like` one of them get its limits too. Returns the names of those that have them.

    Raises ConfigError: `out` exists or lies in another folder, or a profile has low or high already.
    """
    if out.resolve().parent != file.path.resolve().parent:
        raise ConfigError(f"{out} lies in another folder than {file.path}, whose paths are relative", parameter="--out")
    text = file.path.read_text(encoding="utf-8")
    for name in built_in(spec):
        text = _with_limits(text, file.path, name, low, high)
    create(out, text, "--out")
    try:
        made = load(out)
    except ConfigError:
        out.unlink()
        raise
    return [name for name, p in made.profiles.items() if (p.limits.low == low).all() and (p.limits.high == high).all()]


def _with_limits(text: str, path: Path, name: str, low: np.ndarray, high: np.ndarray) -> str:
    """A file's text with low and high of one profile."""
    limits = f"low = {_numbers(low)}\nhigh = {_numbers(high)}\n"
    header = re.search(rf"^\[profile\.{re.escape(name)}\][^\n]*\n", text, re.MULTILINE)
    if header is None:
        if re.search(rf"^(profile\.{re.escape(name)}\b|\[profile\])", text, re.MULTILINE):
            what = f"{path} has it in another form than a table [profile.{name}]. Write it so."
            raise ConfigError(what, parameter=f"profile.{name}")
        return text.rstrip("\n") + f"\n\n[profile.{name}]  # low and high: taught by hand\n{limits}"
    rest = text[header.end() :]
    body = re.split(r"^\[", rest, maxsplit=1, flags=re.MULTILINE)[0]
    if re.search(r"^\s*(low|high)\s*=", body, re.MULTILINE):
        raise ConfigError(f"{path} has low or high already. Remove them there first.", parameter=f"profile.{name}")
    return text[: header.end()] + limits + rest


def _numbers(values: np.ndarray) -> str:
    return "[{}]".format(", ".join(f"{x:.4f}" for x in values))
