"""The operator of a process that moves a real robot: a terminal, a pedal, gestures, and the page of `--viewer`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from serl_chunk.attention.alarm import Alarm
from serl_chunk.attention.attention import Attention
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.fields import require
from serl_chunk.config.operator import LEADERS, changes
from serl_chunk.console.bindings import Action, bind_gestures, bind_keys
from serl_chunk.console.console import OperatorConsole
from serl_chunk.console.feed import LiveFeed
from serl_chunk.console.terminal import is_usable
from serl_chunk.devices.robot_hosted import open_pedal as open_hosted_pedal
from serl_chunk.logs import logging_to
from serl_chunk.operator.devices import OperatorDevices, Pedal
from serl_chunk.operator.operator import Operator
from serl_chunk.robots.served.cameras import ServedPictures
from serl_chunk.robots.served.operator import ServedOperator
from serl_chunk.signals import before_exit, holding_at_hangup
from serl_chunk.types import Amend, RobotSpec
from serl_chunk_robot.devices.base import DeviceError
from serl_chunk_robot.devices.evdev_device import BUTTONS as KEYBOARD_BUTTONS
from serl_chunk_robot.devices.evdev_device import MOVES as KEYBOARD_MOVES
from serl_chunk_robot.devices.evdev_device import PAD_NAMES as GAMEPAD
from serl_chunk_robot.devices.evdev_device import FootPedal

if TYPE_CHECKING:
    from serl_chunk.live.server import LivePage


def bindings_of(config: ExperimentConfig) -> tuple[dict[str, Action], dict[str, Action]]:
    """Return key -> action and gesture -> action. Raises ConfigError where one is unknown, or mapped twice."""
    operator = config.operator
    keys = bind_keys(changes(operator.keys, "operator.keys"), parameter="operator.keys")
    gestures = bind_gestures(changes(operator.gestures, "operator.gestures"), parameter="operator.gestures")
    kind, device = config.actor.intervention.lower(), config.device
    moving: tuple[str, ...] = ()  # keys by which the device moves the robot
    if kind == "keyboard":
        moving = (*KEYBOARD_MOVES, *KEYBOARD_BUTTONS)
    elif kind == "gamepad":
        moving = (*GAMEPAD[:2], *(GAMEPAD[k] for k in (device.dead_man, device.switch_button) if 0 <= k < len(GAMEPAD)))
    for name in moving:
        action = keys.get(name)
        require(action is None, "operator.keys",
            f"{name!r} is mapped twice (got {action}, and a motion by the {kind} {', '.join(device.paths)}, "
            f"expected one). Choose another key for {action}")  # fmt: skip
    return keys, gestures


def device_has_keys(config: ExperimentConfig, keys: Mapping[str, Action]) -> bool:
    """Return whether the device that moves the robot has keys of the operator as well."""
    kind = config.actor.intervention.lower()
    return not config.device.hosted and (
        kind == "keyboard" or (kind == "gamepad" and not set(GAMEPAD).isdisjoint(keys))
    )


def check_operator(config: ExperimentConfig, page: LivePage | None) -> bool:
    """Return whether there is an operator (`console_of`). Raises what that raises, but for the robot's server."""
    settings, there = config.operator, _is_there(config, page, simulated=False)
    if there and settings.attention:
        Alarm.read(settings.attention, "operator.attention")
    if there and settings.pedal and not settings.pedal_hosted:
        open_pedal(settings.pedal).close()
    return there


def _is_there(config: ExperimentConfig, page: LivePage | None, *, simulated: bool) -> bool:
    settings, keys = config.operator, bindings_of(config)[0]
    usable = page is not None or is_usable(0, 1) or bool(settings.pedal) or device_has_keys(config, keys)
    if not (config.robot.real or simulated or page is not None) or not usable:
        alone = f"{settings.attention} is for an operator, and there is no terminal or pedal. Start it at a terminal"
        require(not (config.robot.real and settings.attention), "operator.attention", alone)
        driven = config.device.align == "drive" and config.actor.intervention.lower() in LEADERS
        alone = "drive is for an operator, who may stop it, and there is no terminal or pedal. Start it at one, or set"
        require(not driven, "device.align", f"{alone} near")
        return False
    return True


def open_pedal(device: str) -> FootPedal:
    """Open a foot pedal. Raises DeviceError, which names the setting."""
    try:
        return FootPedal(device)
    except DeviceError as error:
        raise DeviceError(str(error), parameter="operator.pedal") from error


@contextlib.contextmanager
def console_of(
    config: ExperimentConfig, name: str, *, amend: Callable[[Amend], object], end: Callable[[], None],
    page: LivePage | None = None, spec: RobotSpec | None = None, simulated: bool = False,
    takes: Callable[[Action], bool] = lambda action: False,
) -> Iterator[Operator | None]:  # fmt: skip
    """Yield the operator of a robot, whose keys are read while this is open.

    There is none (None) of a simulator, and where there is no terminal, pedal, device with keys or page. With a page a
    simulator has one as well: it waits for no countdown.

    Args:
        name: of this process, for the robot's server.
        amend: sends a correction of a recorded episode.
        end: ends this process (Ctrl-C).
        page: shows the episodes of the robot of `spec`.
        simulated: a simulator has an operator too, as where a human moves it.
        takes: see `Operator`.

    Raises:
        ConfigError: a key or gesture is unknown, or mapped twice; `operator.attention` is no alarm; there is no
            operator, whom that or `device.align=drive` needs; the robot's server has no such pedal.
        DeviceError: the pedal cannot be opened.
        RobotError: no server answers.
    """
    settings, (keys, gestures) = config.operator, bindings_of(config)
    if not _is_there(config, page, simulated=simulated):
        yield None
        return
    alarm = Alarm.read(settings.attention, "operator.attention") if settings.attention else None
    with contextlib.ExitStack() as stack:
        pedal: Pedal | None = None
        if settings.pedal_hosted:
            pedal = stack.enter_context(contextlib.closing(open_hosted_pedal(config.robot, settings.pedal)))
        elif settings.pedal:
            pedal = stack.enter_context(contextlib.closing(open_pedal(settings.pedal)))
        robot = None
        if config.robot.server:
            robot = stack.enter_context(contextlib.closing(ServedOperator(config.robot, f"{name} console")))
        console = stack.enter_context(OperatorConsole(keys, gestures))
        before_exit(console.close)
        if console.terminal is not None:
            stack.enter_context(logging_to(console.line))
        operator = Operator(
            console, robot, amend=amend, end=end, now=time.monotonic,
            devices=OperatorDevices(gestures, pedal, keys=keys), inputs={**keys, **gestures},
            countdown=settings.countdown_s if config.robot.real else 0.0,
            ready=settings.ready if config.robot.real else "",
            attention=Attention(alarm, holds=settings.attention_holds), takes=takes,
        )  # fmt: skip
        goes_on = pedal is not None and any(name.startswith("pedal") and a is Action.GO for name, a in gestures.items())
        # Without one of these no operator could resume after a hold.
        if config.robot.real and (page is not None or goes_on or device_has_keys(config, keys)):
            stack.enter_context(holding_at_hangup(lambda: operator.request(Action.HOLD, "terminal")))
        if page is not None and spec is not None:
            operator.feed = feed = LiveFeed()
            cameras = ServedPictures(config.robot, f"{name} page") if config.robot.server else None
            title = f"{config.name}: {name}"
            page.begin(operator, feed, spec, title=title, keys=keys, cameras=cameras)
        yield operator


@contextlib.contextmanager
def page_on(viewer: str | None) -> Iterator[LivePage | None]:
    """Take the port of `--viewer`, and print the page's address; None without one.

    Raises ConfigError for an address of another machine, and a port that cannot be used.
    """
    if viewer is None:
        yield None
        return
    require(viewer.isascii() and viewer.isdigit(), "viewer",
        f"must be a port, got {viewer!r}: the page is served to this machine alone (127.0.0.1). Give a port, and "
        "from another machine use ssh -L PORT:127.0.0.1:PORT")  # fmt: skip
    from serl_chunk.live.server import LivePage

    with contextlib.closing(LivePage(int(viewer))) as page:
        print(f"live page: {page.url}", flush=True)
        yield page
