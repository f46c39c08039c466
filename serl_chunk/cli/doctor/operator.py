"""Checks of `serl-chunk doctor`: the operator's device, pedal and alarm, opened as an actor opens them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from serl_chunk.attention.alarm import Alarm
from serl_chunk.cli.console import bindings_of, open_pedal
from serl_chunk.cli.doctor.checks import Check, failed, ok, warning
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.devices.human import HumanIntervention
from serl_chunk.devices.registry import make_intervention
from serl_chunk.devices.robot_hosted import open_pedal as open_hosted_pedal
from serl_chunk.types import RobotSpec, SerlChunkError
from serl_chunk_robot.devices.base import InputDevice

MOVES_S = 10.0  # in which the user moves a mouse
POLL_S = 0.02


def check_operator(config: ExperimentConfig, spec: RobotSpec) -> Iterator[Check]:
    """Open the device of `actor.intervention` for a robot of `spec`, the pedal and the alarm. Nothing moves."""
    operator, source = config.operator, config.actor.intervention
    if source not in ("none", "scripted"):
        yield from _intervention(config, spec)
    if operator.keys or operator.gestures or operator.pedal:
        yield _tried("operator's keys", lambda: f"{len(bindings_of(config)[0])} keys, each for one action")
    if operator.pedal:
        yield _tried("pedal", lambda: _pedal(config))
    if operator.attention:
        yield _tried("attention", lambda: _alarm(operator.attention))


def _tried(name: str, attempt: Callable[[], str]) -> Check:
    try:
        return ok(name, attempt())
    except SerlChunkError as e:
        return failed(name, str(e))


def _pedal(config: ExperimentConfig) -> str:
    name, hosted = config.operator.pedal, config.operator.pedal_hosted
    with contextlib.closing(open_hosted_pedal(config.robot, name) if hosted else open_pedal(name)) as pedal:
        return f"{pedal.name} can be read: {', '.join(pedal.pedals)}"


def _alarm(file: str) -> str:
    Alarm.read(file, "operator.attention")
    return f"{file} can be read"


def _intervention(config: ExperimentConfig, spec: RobotSpec) -> Iterator[Check]:
    name, source = "input device", config.actor.intervention
    # What an environment has in addition moves the robot, or is requested of its server.
    env: Any = SimpleNamespace(robot_spec=spec, drive_leaders=lambda *_: None)
    try:
        opened = make_intervention(source, env, config)
    except SerlChunkError as e:
        yield failed(name, str(e))
        return
    assert opened is not None
    with contextlib.closing(opened):
        if not isinstance(opened, HumanIntervention):
            yield ok(name, f"{source} can be read")
        for device in opened.devices if isinstance(opened, HumanIntervention) else ():
            yield from _moved(device)


def _moved(device: InputDevice) -> Iterator[Check]:
    """Check that a device can be read; of a receiver's interfaces the user shows which one is the mouse."""
    name, there = f"input device {device.name}", _interfaces(device)
    if len(there) < 2:
        alive, remedy = device.read().alive, "plug it in again, and look at its power"
        yield ok(name, "can be read") if alive else failed(name, "it can be opened, and reports nothing", remedy)
        return
    yield Check("SpaceMouse", "-", f"{device.name}: move the mouse, within {MOVES_S:g} s; it is one of {len(there)}")
    ends = time.monotonic() + MOVES_S
    while len(_interfaces(device)) > 1 and time.monotonic() < ends:
        time.sleep(POLL_S)
    if len(_interfaces(device)) > 1:
        remedy = "run it again, and push the handle; look at the mouse's switch and battery, or pair it anew"
        yield warning(name, f"no interface moved: {', '.join(there)}", remedy)
    else:
        yield ok(name, f"the mouse is {', '.join(_interfaces(device))}, of the receiver's {len(there)} interfaces")


def _interfaces(device: InputDevice) -> tuple[str, ...]:
    """Return the paths that may be a SpaceMouse's; of other devices none."""
    found: tuple[str, ...] = getattr(device, "interfaces", ())
    return found
