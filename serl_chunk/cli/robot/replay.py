"""`serl-chunk robot replay`: plays one recorded episode's actions on the served robot, and compares its joints."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from serl_chunk.cli.data.options import open_any, options_of
from serl_chunk.cli.doctor.checks import require_free
from serl_chunk.cli.robot.dry import Recorded, add_common, recorded
from serl_chunk.config.fields import require
from serl_chunk.io import Waiting
from serl_chunk_robot.client.client import Keys, RobotClient, RobotError
from serl_chunk_robot.robot_file.profiles import CAUTIOUS

logger = logging.getLogger(__name__)

FAR = 0.5  # rad that a joint may be from the first target after the reset: jogs take one joint at a time
HAIR = 1e-4
PATIENCE = 120.0  # s of a motion of the server's
REMIND = 10.0  # s between two lines while a human operator is waited for
LAGS = 10  # ticks


def replay_flags(p: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    p.description = (
        "Play one recorded episode on the served robot at its rate, after the server's reset and jogs led to its first "
        "target, and compare measured joints with the recorded ones."
    )
    add_common(p)
    p.add_argument("--episode", default="0", metavar="N", help="its number; default: 0")
    p.add_argument("--robot", default="127.0.0.1", metavar="HOST[:PORT]", help="default: 127.0.0.1:5600")
    p.add_argument("--server_keys", metavar="FILE", help="an operator's keys for the robot's server")


def replay_command(flags: argparse.Namespace) -> int:
    """Play the episode and print the figures. Raises ConfigError, DataError and RobotError."""
    if flags.json is not None:
        require_free("json", flags.json)
    keys = None if flags.server_keys is None else Keys.of_file(Path(flags.server_keys).expanduser())
    require(flags.episode.isdigit(), "episode", f"{flags.episode!r} is no number of an episode")
    source = open_any(flags.path, options_of(flags), flags.from_format)
    show = functools.partial(print, flush=True)
    with (
        RobotClient(flags.robot, name="replay", role="operator", keys=keys) as operator,
        RobotClient(flags.robot, name="replay", role="controller", keys=keys) as controller,
    ):
        spec = operator.hello()["spec"]
        episode = next(recorded(source, flags.episode, len(spec["low"]), spec["tick"]))
        approach(operator, controller, episode.actions[0], list(spec["grippers"]), show)
        await_go(controller, show)  # a jog ends in HELD
        show(f"{episode.name}: {len(episode.actions)} actions, {len(episode.actions) * spec['tick']:.1f} s")
        played = play(controller, episode, spec["tick"])
    figures = compared(episode, played, spec["tick"])
    slowed, behind, late = figures["slowed"], 1e3 * figures["behind"], 1e3 * figures["late"]
    print(
        f"{slowed} of {figures['ticks']} ticks were slowed; the robot is {behind:.0f} ms behind the recorded "
        f"{figures['with']}; commands were late by {late:.1f} ms at most"
    )
    for joint, (rms, most) in enumerate(zip(figures["rms"], figures["max"], strict=True)):
        print(f"joint {joint:3}  rms {rms:.4f}  at most {most:.4f}")
    if flags.json is not None:
        Path(flags.json).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


class Played(NamedTuple):
    """What was measured, float64[T, J], before each action; and of how many ticks the robot was slowed."""

    joints: np.ndarray
    slowed: int
    late: float  # s, the largest delay of a command


def approach(
    operator: RobotClient, controller: RobotClient, target: np.ndarray, grippers: list[int], show: Callable[[str], None]
) -> None:
    """Lead the robot to the first target by the server's own motions, under the profile first_day.

    `controller`: has the lease, and keeps it. A human operator lets it go on first (`await_go`). Raises RobotError: the
    robot is stopped, a joint is too far away after the reset, or a motion does not end.
    """
    state = await_go(controller, show)
    profile = state["profile"]
    generation = operator.request("profile", generation=state["generation"], name=CAUTIOUS)["generation"]
    try:
        show(f"reset, under {CAUTIOUS}")
        state = _moved(controller, controller, "reset", generation)
        away = target - state["set_point"]
        far = [j for j in np.flatnonzero(np.abs(away) > FAR).tolist() if j not in grippers]
        if far:
            raise RobotError(
                f"joint {far[0]} is {away[far[0]]:+.2f} rad from the episode's first target after the "
                f"reset, expected at most {FAR:g}. Let a [[reset.step]] lead there."
            )
        for joint in np.flatnonzero(np.abs(away) > HAIR).tolist():
            show(f"joint {joint} by {away[joint]:+.3f}")
            state = _moved(operator, controller, "jog", state["generation"], joint=joint, angle=float(away[joint]))
    finally:
        with contextlib.suppress(RobotError):  # while the robot moves, it stays under the slower one
            operator.request("profile", generation=operator.request("ping")["generation"], name=profile)


def await_go(controller: RobotClient, show: Callable[[str], None]) -> dict[str, Any]:
    """Wait until a human operator lets the controller move a robot that is HELD; returns the state in HOLD.

    Raises RobotError where the robot is stopped.
    """
    controller.request("lease")
    lines = Waiting(logger, REMIND)
    while (state := _kept(controller, controller))["state"] != "HOLD":
        if state["state"] == "STOPPED":
            raise RobotError(
                f"the robot is in STOPPED ({state['word']}), expected HOLD. Look at the cell, run "
                "`serl-chunk robot clear`, and then this again."
            )
        if lines.due():
            show(
                f"the robot is in {state['state']} ({state['word']}). Look at the cell, then run in another terminal: "
                "serl-chunk robot go"
            )
    return state


def _moved(client: RobotClient, controller: RobotClient, op: str, generation: int, **arguments: Any) -> dict[str, Any]:
    """Request a motion from the state that was read last, of `generation`, and wait for its end; returns the state."""
    motion, ends = client.request(op, generation=generation, **arguments)["motion"], time.monotonic() + PATIENCE
    while (state := _kept(client, controller))["state"] == "MOVE":
        if time.monotonic() > ends:
            raise RobotError(f"the motion did not end within {PATIENCE:g} s")
    if state["done"] != motion:
        raise RobotError(f"the motion ended in {state['state']} ({state['word']})")
    return state


def _kept(client: RobotClient, controller: RobotClient) -> dict[str, Any]:
    controller.request("ping")
    return client.next_state()


def play(controller: RobotClient, episode: Recorded, tick: float) -> Played:
    """Send the actions at their rate, under the profile that is chosen. Raises RobotError where the robot stops."""
    joints, slowed, late = [], 0, 0.0
    controller.request("lease")
    controller.request("arm", generation=controller.next_state()["generation"])
    first = {"target": episode.actions[0], "number": 0, "generation": controller.generation}
    try:
        # With an answer: a target that is too far is refused in the gate's words.
        controller.request("command", **first)
        began = time.monotonic()
        for k, action in enumerate(episode.actions):
            due = began + k * tick
            time.sleep(max(due - time.monotonic(), 0.0))
            late = max(late, time.monotonic() - due)
            state = controller.newest_state() or controller.next_state()
            if k and state["state"] != "RUN":
                raise RobotError(f"the robot stopped after {k} of {len(episode.actions)} actions: {state['word']}")
            joints.append(state["q"])
            slowed += bool(k and (state["factor"] < 1 or state["reason"]))
            controller.send_command(action, k + 1)
        time.sleep(tick)
    finally:
        with contextlib.suppress(RobotError):
            controller.request("release")
    return Played(np.array(joints), slowed, late)


def compared(episode: Recorded, played: Played, tick: float) -> dict[str, Any]:
    """Compare measured joints with the recorded ones; returns figures for JSON.

    `behind`: seconds by which the robot follows the recorded joints.
    """
    recorded = episode.actions if episode.joints is None else episode.joints
    errors = [np.sqrt(np.mean((played.joints[n:] - recorded[: len(recorded) - n]) ** 2)) for n in range(LAGS)
              if n < len(recorded)]  # fmt: skip
    apart = played.joints - recorded
    return {
        "episode": episode.name, "ticks": len(recorded), "slowed": int(played.slowed), "late": played.late,
        "with": "actions" if episode.joints is None else "joints", "behind": int(np.argmin(errors)) * tick,
        "rms": np.sqrt((apart**2).mean(axis=0)).tolist(), "max": np.abs(apart).max(axis=0).tolist(),
    }  # fmt: skip
