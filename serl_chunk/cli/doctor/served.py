"""Checks of `serl-chunk doctor`: the robot's server that `robot.server` names, and its cameras."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from serl_chunk.cli.doctor.checks import Check, duration, failed, ok, warning
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.robots.served import connect
from serl_chunk.robots.served.cameras import STALE_S
from serl_chunk.robots.served.robot import differing_fields
from serl_chunk.types import ConfigError, RobotSpec
from serl_chunk_robot.client.client import RobotClient, RobotError
from serl_chunk_robot.commands.diagnosis import remedy_of

LATE_S = 0.01  # of 99 passes of 100
PICTURES_S = 1.5  # for the first picture of every camera
POLL_S = 0.02
_NAME = "robot server"


def check_served(config: ExperimentConfig, spec: RobotSpec) -> Iterator[Check]:
    """Ask the robot's server for its state, and compare its robot with `spec`. It takes no lease and moves nothing."""
    robot = config.robot
    try:
        with connect(robot, "doctor") as client:
            hello = client.hello()
            state = client.next_state()
            yield _state(robot.server, state)
            if name := state["controller"]:
                remedy = "if that is not this actor's own, end it: a robot has one controller"
                yield warning("robot controller", f"{name} has the robot", remedy)
            else:
                yield ok("robot controller", "none: the robot is free")
            late = {name: float(state["late"][name]) for name in ("p50", "p99", "max")}
            said = ", ".join(f"{duration(seconds)} ({name})" for name, seconds in late.items())
            remedy = "give the server real-time priority, as its log describes, and end other programs on the robot PC"
            yield warning("robot lateness", said, remedy, fine=late["p99"] <= LATE_S, **late)
            served = hello["spec"]
            if differing := differing_fields(spec, served):
                said = f"{served['name']!r} is not the robot {spec.name!r} of this experiment: {'; '.join(differing)}"
                remedy = "serve the robot of this experiment, or correct the experiment's specification"
                yield failed("robot spec", said, remedy)
            else:
                ticks = f"{1 / served['tick']:g} ticks a second"
                yield ok("robot spec", f"{len(served['low'])} joints, {ticks}, as the experiment's")
            yield from _cameras(client, spec, config.agent.image_keys)
    except ConfigError as e:
        yield failed(_NAME, str(e), "correct robot.server, or robot.server_keys")
    except RobotError as e:
        yield failed(_NAME, str(e), "start it on the robot PC: serl-chunk robot serve robot.toml")


def _state(server: str, state: dict[str, Any]) -> Check:
    causes = "; ".join(state["causes"].values())
    said = f"{server}, {state['robot']!r}: {state['state']}, {state['word']}" + (f"; now {causes}" if causes else "")
    said += f"; profile {state['profile']} ({state['digest']})"
    if state["state"] == "HELD":  # as after each start, and each end of an actor
        return ok(_NAME, f"{said}. It moves only after an operator's go")
    fine = state["state"] not in ("STOPPED", "STALLED")
    return warning(_NAME, said, "" if fine else remedy_of(causes or state["word"]), fine=fine)


def _cameras(client: RobotClient, spec: RobotSpec, names: Sequence[str]) -> Iterator[Check]:
    sizes = {name: (height, width) for name, height, width, _ in client.cameras()}
    for name in names:
        wanted = spec.camera(name)
        if name not in sizes:
            yield failed("robot camera", f"{name}: the server has {', '.join(sizes) or 'none'}",
                         "add a table [[camera]] with this name to the robot's file")  # fmt: skip
        elif sizes[name] != (wanted.height, wanted.width):
            height, width = sizes[name]
            said = f"{name}: {height} x {width} (height, width), expected {wanted.height} x {wanted.width}"
            yield failed("robot camera", said, "set height and width of that [[camera]], or of the experiment's camera")
        else:
            yield _age(client, name)


def _age(client: RobotClient, name: str) -> Check:
    ends, picture = time.monotonic() + PICTURES_S, None
    first: int | None = None
    while time.monotonic() < ends:
        client.newest_state()
        picture = client.newest_picture(name)
        if picture is not None:
            first = picture.number if first is None else first
            if picture.number != first:
                break
        time.sleep(POLL_S)
    if picture is None:
        return failed(
            "robot camera", f"{name}: no picture within {PICTURES_S:g} s", "read the log of the robot's server"
        )
    age = max(client.server_time() - picture.changed, 0.0)
    remedy = (
        f"its pictures are decided on up to {duration(STALE_S)} of age: look at its rate and cable, and at the network"
    )
    if age > STALE_S:
        return failed("robot camera", f"{name}: its newest picture is {duration(age)} old", remedy, age_s=age)
    return ok("robot camera", f"{name}: its newest picture is {duration(age)} old", age_s=age)
