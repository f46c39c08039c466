"""Devices that a robot's server hosts: their tables, their processes, and their readings over real sockets."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np
import pytest
from errors import naming
from hosted_device import HostedDevice
from robot_served import HERE, free_port, served, wait

from serl_chunk_robot.client.client import Reading, RobotError
from serl_chunk_robot.devices.base import Sample
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.robot_file.config import load
from serl_chunk_robot.server.processes import Processes
from serl_chunk_robot.server.streams import device_children

DEVICES = """
import time
import numpy as np
from serl_chunk_robot.devices.base import DeviceError, KeyEvent, Sample

class Faulty:
    def __init__(self, fault=""):
        if fault == "unplugged":
            raise DeviceError("/dev/mouse: no such device. Plug it in")
        self.name, self.fault = "a test's", fault

    def read(self):
        if self.fault == "hangs":
            time.sleep(1000)
        if self.fault == "spins":
            while True:
                pass
        return Sample(None, np.arange(7.0), (True,), time.monotonic(), True)

    def close(self):
        pass

class Pedal(Faulty):
    pedals = ("left", "right")

    def keys(self):
        return [KeyEvent("left", True, time.monotonic())]
"""


def robot_file(folder: Path, *tables: str, more: str = "") -> Path:
    (folder / "faulty.py").write_text(DEVICES)
    path = folder / "robot.toml"
    text = "".join(f"[[device]]\n{table}\n" for table in tables)
    path.write_text(f'name = "cell"\ndriver = "fake"\nport = {free_port(2 + len(tables))}\n{more}{text}')
    return path


MOUSE = 'name = "a"\ndriver = "spacemouse"'


@pytest.mark.parametrize(
    ("table", "parameter", "named"),
    [
        ('name = "a b"\ndriver = "gello"', "device[0].name", "letter"),
        ('name = "a"\ndriver = "spacemice"', "device[0].driver", "spacemouse"),
        (MOUSE + '\npaths = "b"', "device[0].paths", "path"), (MOUSE + "\narm = 2", "device[0].arm", "0 to 1"),
        (f"{MOUSE}\n[[device]]\n{MOUSE}", "device[1].name", "before"),
        ('name = "a"\ndriver = "lerobot"\nparams = { port = "b" }', "device[0].type", "missing"),
    ],
)  # fmt: skip
def test_wrong_tables_are_refused_with_the_key(tmp_path, table, parameter, named):
    with pytest.raises(ConfigError, match=naming(named)) as refused:
        load(robot_file(tmp_path, table))
    assert refused.value.parameter == parameter


def test_two_tables_with_one_serial_port_are_refused(tmp_path):
    (tmp_path / "by-id").symlink_to(tmp_path / "tty")
    lerobot = 'driver = "lerobot"\ntype = "so101_leader"\nparams = {{ port = "{}" }}'.format
    tables = [f'name = "{name}"\n{lerobot(tmp_path / port)}' for name, port in (("a", "tty"), ("b", "by-id"))]
    load(robot_file(tmp_path, tables[0]))
    with pytest.raises(ConfigError, match=naming("by-id", "device[0].params.port", "/dev/serial/by-id")) as refused:
        load(robot_file(tmp_path, *tables))
    assert refused.value.parameter == "device[1].params.port"
    arm = 'name = "lerobot"\ntype = "bi_so_follower"\nlow = -2\nhigh = 2\nvelocity = 4\n'
    arm += f'params = {{ left_arm_config = {{ port = "{tmp_path / "tty"}" }} }}\n'
    (tmp_path / "robot.toml").write_text(f'name = "cell"\n[driver]\n{arm}[[device]]\n{tables[1]}')
    with pytest.raises(ConfigError, match=naming("driver.params.left_arm_config.port")):
        load(tmp_path / "robot.toml")


def test_a_process_publishes_readings_and_one_that_cannot_open_its_device_is_started_anew(tmp_path, caplog):
    file = load(robot_file(tmp_path, 'name = "good"\ndriver = "faulty.py:Faulty"',
                           'name = "bad"\ndriver = "faulty.py:Faulty"\nfault = "unplugged"'))  # fmt: skip
    listed = tuple((d.name, d.port, d.arm) for d in file.devices)
    with served(port=file.port, devices=listed) as robot:
        with Processes(device_children(file.devices, HERE, None, robot.server.run_id)) as processes:
            client = robot.client(role="any")
            assert client.devices() == list(listed)
            wait(lambda: client.next_reading("good", 0.05) is not None)
            reading = client.next_reading("good", 1.0)
            np.testing.assert_array_equal(reading.joints, np.arange(7.0))
            assert (reading.twist, reading.buttons, reading.alive) == (None, (True,), True)
            assert abs(client.server_time() - reading.stamp) < 0.5
            wait(lambda: "device ended: name=bad reason=" in caplog.text)
            assert "/dev/mouse: no such device. Plug it in" in caplog.text
            assert client.next_reading("bad", 0.05) is None
            with pytest.raises(RobotError, match="device 'left': the server has good, bad"):
                client.next_reading("left", 0.05)
        assert processes.pids() == []


def test_events_of_a_pedal_are_repeated_for_two_seconds_and_numbered(tmp_path):
    file = load(robot_file(tmp_path, 'name = "foot"\ndriver = "faulty.py:Pedal"'))
    listed = tuple((d.name, d.port, d.arm) for d in file.devices)
    with contextlib.ExitStack() as stack:
        robot = stack.enter_context(served(port=file.port, devices=listed))
        stack.enter_context(Processes(device_children(file.devices, HERE, None, robot.server.run_id)))
        client = robot.client(role="any")
        readings: list[Reading] = []

        def reads() -> bool:
            reading = client.next_reading("foot", 0.05)
            if reading is not None:
                readings.append(reading)
            return reading is not None and len(reading.keys) > 99

        wait(reads, 20.0)
        numbers = [number for number, *_ in readings[-1].keys]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert {event[1:3] for event in readings[-1].keys} == {("left", True)}
        assert abs(client.server_time() - readings[-1].keys[-1][3]) < 0.5
        assert readings[-1].pedals == ("left", "right")
        time.sleep(2.5)
        last = client.next_reading("foot", 1.0)
        assert last.keys[-1][3] - last.keys[0][3] < 2.1
        assert (last.keys[0][0] > 0, last.began) == (True, readings[-1].began)


@pytest.mark.parametrize("fault", ["hangs", pytest.param("spins", marks=pytest.mark.slow)])
def test_a_device_that_does_not_return_delays_no_pass(tmp_path, fault):
    """The measure is the loop's own: with the device in its process, passes go on at their rate."""
    file = load(robot_file(tmp_path, f'name = "bad"\ndriver = "faulty.py:Faulty"\nfault = "{fault}"'))
    with served(port=file.port) as robot, Processes(device_children(file.devices, HERE, None, "run")) as processes:
        client = robot.client(role="any")
        time.sleep(0.7)  # it is open, and read
        assert len(processes.pids()) == 1
        first, began = client.next_state(), time.monotonic()
        time.sleep(0.5)
        last = client.next_state()
        assert last["pass"] - first["pass"] > 0.2 * (time.monotonic() - began) / robot.server._gate.dt
        assert client.request("ping")["ok"]


NONE, STRANGE = Sample(np.full(6, np.nan), None, (True,), 0.0, True), Sample(np.zeros(5), None, (), 0.0, True)
LEADER = Sample(None, np.full(7, 0.5), (), 0.0, True)


@pytest.mark.parametrize(
    ("run", "name", "sample"),
    [("", "other", LEADER), ("another process", "leader", LEADER), ("", "leader", NONE), ("", "leader", STRANGE)],
    ids=["name", "run", "nan", "shape"],
)
def test_what_is_no_reading_of_this_device_and_server_is_left_out_or_lifeless(run, name, sample):
    port = free_port(3)
    with (
        served(port=port, devices=(("leader", port + 2, 0),)) as robot,
        HostedDevice(run or robot.server.run_id, name, port + 2, sample),
    ):
        client = robot.client(role="any")
        client.hello()
        got = [client.next_reading("leader", 0.02) for _ in range(20)]
    assert not any(reading is not None and reading.alive for reading in got)
    assert sample is not NONE or any(reading is not None and not reading.twist.any() for reading in got)
