"""Input devices that the robot's server hosts, as devices of this machine."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence

from serl_chunk.config.robots import RobotConfig
from serl_chunk.robots.served import connect
from serl_chunk.types import ConfigError, RobotSpec
from serl_chunk_robot.client.client import Reading, RobotClient, RobotError
from serl_chunk_robot.devices.base import DeviceError, DriveStatus, InputDevice, KeyEvent, Sample
from serl_chunk_robot.devices.evdev_device import KEPT, PEDALS
from serl_chunk_robot.devices.polling import PolledDevice

FIRST_S = 10.0  # for the first reading
WAIT_S = 0.05  # for the next one, at each look
PING_S = 0.5  # between two requests, which keep the map of the clocks
ANSWER_S = 1.0  # for the reply to one


class RemoteDevice(PolledDevice):
    """A table [[device]] of the robot's server. A thread takes its readings in.

    Stamps are mapped to this machine's clock, so that a reading older than 0.2 s is not alive: that of a device or a
    server that is silent, and one that the network held back.

    Args:
        config: of the robot: server and keys.
        name: of the table.

    Raises:
        DeviceError: no server, no such table, or no reading within 10 s.
        ConfigError: the file of keys cannot be read.
    """

    def __init__(self, config: RobotConfig, name: str) -> None:
        self._config, self.table = config, name
        self._client: RobotClient | None = None
        self._pinged = 0.0
        self._newest: Sample | None = None
        super().__init__(f"{name} at {config.server}")

    def _open(self) -> None:
        self._client = connect(self._config, f"device {self.table}", answer=ANSWER_S)
        try:
            self._client.hello()
            self._pinged = time.monotonic()
            ends = self._pinged + FIRST_S
            while (reading := self._client.next_reading(self.table, WAIT_S)) is None:
                if time.monotonic() > ends:
                    raise DeviceError(
                        f"{self.name}: no reading within {FIRST_S:g} s. The server's log says why. "
                        "device.paths names the devices that are used"
                    )
        except RobotError as e:
            raise DeviceError(f"{self.name}: {e}") from e
        self._take(reading)

    def _look(self) -> Sample:
        assert self._client is not None
        if time.monotonic() - self._pinged > PING_S:
            self._client.request("ping")
            self._pinged = time.monotonic()
        reading = self._client.next_reading(self.table, WAIT_S)
        if reading is not None:
            self._take(reading)
        assert self._newest is not None
        return self._newest

    def _release(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _take(self, reading: Reading) -> None:
        assert self._client is not None
        age = self._client.server_time() - reading.stamp
        now = self._clock()
        # A stamp ahead of the mapped clock, by the map's error, is of now. Without a map it is too old for any use.
        stamp = -math.inf if math.isnan(age) else now - max(age, 0.0)
        drive = None if reading.drive is None else DriveStatus(*reading.drive)
        self._newest = Sample(reading.twist, reading.joints, reading.buttons, stamp, reading.alive, drive)


class RemotePedal(RemoteDevice):
    """A foot pedal of the robot's server, whose events come with the readings; see RemoteDevice."""

    def __init__(self, config: RobotConfig, name: str) -> None:
        self.pedals: tuple[str, ...] = ()
        self._events: deque[KeyEvent] = deque(maxlen=KEPT)
        self._began, self._number = 0.0, -1  # of the device's process, and of its newest event
        super().__init__(config, name)

    def keys(self) -> list[KeyEvent]:
        return [self._events.popleft() for _ in range(len(self._events))]

    def _take(self, reading: Reading) -> None:
        super()._take(reading)
        assert self._client is not None
        first, self.pedals = not self._began, reading.pedals
        if reading.began != self._began:
            self._began, self._number = reading.began, -1
        ahead, now = self._clock() - self._client.server_time(), self._clock()
        for number, name, pressed, stamp in reading.keys:
            if number > self._number:
                self._number = number
                if not first:  # what was pressed before does not count
                    self._events.append(KeyEvent(name, pressed, now if math.isnan(ahead) else min(now, stamp + ahead)))


def open_pedal(config: RobotConfig, name: str) -> RemotePedal:
    """Open the operator's pedal, a table of the robot's server.

    Raises:
        ConfigError: no server, no such table, or a device that is no pedal.
        DeviceError: it cannot be read.
    """
    _tables(config, [name], "operator.pedal")
    pedal = RemotePedal(config, name)
    if not pedal.pedals or not {*pedal.pedals} <= {*PEDALS}:
        pedal.close()
        raise ConfigError(
            f"{pedal.name} has the pedals {', '.join(pedal.pedals) or 'none'} (expected some of {', '.join(PEDALS)}). "
            'Give its table driver = "pedal", and these names',
            parameter="operator.pedal",
        )
    return pedal


class Part:
    """One arm's joints of a device that has those of several arms. The first part closes the device."""

    def __init__(self, device: InputDevice, first: int, end: int) -> None:
        self.name, self._device, self._first, self._end = device.name, device, first, end
        self.table: str = getattr(device, "table", "")  # of a device that the robot's server hosts

    def read(self) -> Sample:
        sample = self._device.read()
        joints = None if sample.joints is None else sample.joints[self._first : self._end]
        if joints is not None and len(joints) < self._end - self._first:  # the server's file was changed meanwhile
            joints = None
        return sample._replace(joints=joints, alive=sample.alive and joints is not None)

    def close(self) -> None:
        if self._first == 0:
            self._device.close()


def open_hosted(
    config: RobotConfig, spec: RobotSpec, names: Sequence[str], *, joints: bool
) -> list[tuple[int, InputDevice]]:
    """Open devices of the robot's server; returns each with the arm that it moves, by arm.

    Args:
        names: of tables [[device]]; empty: all that have `joints`, or else a twist.
        joints: leaders, in place of devices that move a tip.

    Raises:
        ConfigError: no server, no such device, or one that does not fit the robot's arms.
        DeviceError: one cannot be read.
    """
    tables = _tables(config, names, "device.paths")
    arms = spec.arms or ((0, spec.action_dim),)
    kind = "joints" if joints else "a twist"
    with contextlib.ExitStack() as opened:
        found: dict[int, InputDevice] = {}
        arm = 0
        for name, first in tables:
            device = RemoteDevice(config, name)
            opened.callback(device.close)
            sample = device.read()
            if (sample.joints if joints else sample.twist) is None:
                if names:
                    raise ConfigError(
                        f"{device.name} has no {kind}, as actor.intervention needs it", parameter="device.paths"
                    )
                device.close()
                continue
            arm = first if first >= 0 else arm
            parts = _parts(device, sample, arms[arm:], f"arm {arm} of {config.server}") if joints else [device]
            for part in parts:
                if arm >= len(arms) or arm in found:
                    raise ConfigError(
                        f"{device.name} moves arm {arm}, and robot {spec.name!r} has {len(arms)}, each of "
                        "them moved by one device. Set `arm` in its table",
                        parameter="device.paths",
                    )
                found[arm] = part
                arm += 1
        if not found:
            there = ", ".join(name for name, _ in tables) or "none"
            raise ConfigError(f"{config.server} has no device with {kind} (it has {there}). Add a table [[device]] "
                              "to the robot's file", parameter="actor.intervention")  # fmt: skip
        opened.pop_all()
        return sorted(found.items())


def _parts(device: InputDevice, sample: Sample, arms: Sequence[tuple[int, int]], where: str) -> list[InputDevice]:
    """Split a leader's joints among the arms that it leads."""
    assert sample.joints is not None
    parts: list[InputDevice] = []
    at = 0
    for first, end in arms:
        if at < len(sample.joints):
            parts.append(Part(device, at, at + end - first))
            at += end - first
    if at != len(sample.joints):
        sizes = ", ".join(str(end - first) for first, end in arms) or "no numbers"
        raise ConfigError(
            f"{device.name} has {len(sample.joints)} joints and grippers, and the arms from {where} on take {sizes}",
            parameter="device.paths",
        )
    return parts


def _tables(config: RobotConfig, names: Sequence[str], parameter: str) -> list[tuple[str, int]]:
    """Names and first arms of the server's tables, or of those that are named, in this order."""
    if not config.server:
        raise ConfigError(
            "empty, and the devices are those of a robot server. Give its HOST[:PORT]", parameter="robot.server"
        )
    with connect(config, "devices", answer=ANSWER_S) as client:
        try:
            tables = {name: arm for name, _, arm in client.devices()}
        except RobotError as e:
            raise DeviceError(str(e)) from e
    for name in names:
        if name not in tables:
            raise ConfigError(
                f"{config.server} has no device {name!r} (it has {', '.join(tables) or 'none'}). Add a "
                "table [[device]] with this name to the robot's file",
                parameter=parameter,
            )
    return [(name, tables[name]) for name in names or tables]
