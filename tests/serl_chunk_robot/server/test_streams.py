"""Devices and cameras that a robot's server hosts: their tables, processes, readings and frames over real sockets."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from errors import naming
from hosted_device import HostedDevice
from robot_cameras import PublishedCamera, job
from robot_served import HERE, Served, free_port, served, wait, write_keys

from serl_chunk_robot.client.client import RobotError
from serl_chunk_robot.devices.base import KeyEvent, Sample
from serl_chunk_robot.drivers.camera import CameraError, CameraSpec, Frame
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.robot_file.config import load
from serl_chunk_robot.server.processes import Processes
from serl_chunk_robot.server.streams import FramePublisher, ReadingPublisher, device_children

DEVICES = """
import time
import numpy as np
from serl_chunk_robot.devices.base import DeviceError, Sample

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
"""


def robot_file(folder: Path, *tables: str, more: str = "") -> Path:
    (folder / "faulty.py").write_text(DEVICES)
    path = folder / "robot.toml"
    text = "".join(f"[[device]]\n{table}\n" for table in tables)
    path.write_text(f'name = "cell"\ndriver = "fake"\nport = {free_port(2 + len(tables))}\n{more}{text}')
    return path


MOUSE = 'name = "a"\ndriver = "spacemouse"'


@pytest.mark.parametrize(("table", "parameter", "named"), [
    ('name = "a b"\ndriver = "gello"', "device[0].name", "letter"),
    ('name = "a"\ndriver = "spacemice"', "device[0].driver", "spacemouse"),
    (MOUSE + '\npaths = "b"', "device[0].paths", "path"), (MOUSE + "\narm = 2", "device[0].arm", "0 to 1"),
    (f"{MOUSE}\n[[device]]\n{MOUSE}", "device[1].name", "before"),
    ('name = "a"\ndriver = "lerobot"\nparams = { port = "b" }', "device[0].type", "missing"),
])  # fmt: skip
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


def test_a_client_gets_the_newest_picture_of_the_cameras_it_reads_alone():
    port = free_port(4)
    robot = Served(port=port, cameras=(("top", 12, 16, port + 2), ("wrist", 8, 20, port + 3)))
    cameras = [PublishedCamera("top", port + 2), PublishedCamera("wrist", port + 3, height=8, width=20)]
    try:
        client = robot.client()
        assert client.cameras() == [("top", 12, 16, port + 2), ("wrist", 8, 20, port + 3)]
        wait(lambda: client.newest_picture("top") is not None)
        first = client.newest_picture("top")
        assert (first.image.shape, first.image.dtype) == ((12, 16, 3), np.uint8)
        assert not first.image.flags.writeable
        kept = first.image.copy()
        time.sleep(0.3)  # some 18 pictures, of which one is kept
        client.next_state()
        second = client.newest_picture("top")
        assert second.number > first.number + 5
        assert 0 <= client.server_time() - second.moment < 0.2
        assert second.changed == second.moment
        assert np.array_equal(first.image, kept)
        assert list(client._streams) == [("camera", "top")]
        with pytest.raises(RobotError, match="camera 'left': the server has top, wrist"):
            client.newest_picture("left")
    finally:
        for camera in cameras:
            camera.close()
        robot.close()


def test_frames_need_an_admitted_key_and_the_name_of_their_camera(tmp_path):
    keys = write_keys(tmp_path, left="", gone="")
    port = free_port(3)
    robot = Served(keys=tmp_path, port=port, cameras=(("top", 12, 16, port + 2),))
    camera = PublishedCamera("top", port + 2, keys=tmp_path)
    try:
        admitted = robot.client("left", keys=keys["left"])
        wait(lambda: admitted.newest_picture("top") is not None)
        (tmp_path / "allowed" / "gone.json").unlink()
        stranger = robot.client("gone", keys=keys["gone"])
        stranger._greeting = admitted.hello()  # it knows the ports from elsewhere
        time.sleep(0.6)  # the folder is read every 0.5 s
        ends = time.monotonic() + 0.4
        while time.monotonic() < ends:
            assert stranger.newest_picture("top") is None
            time.sleep(0.01)
        assert admitted.newest_picture("top").number > 5
        camera.close()
        number = admitted.newest_picture("top").number
        camera = PublishedCamera("wrist", port + 2, keys=tmp_path)  # another one at this port
        time.sleep(0.4)
        assert admitted.newest_picture("top").number == number
    finally:
        camera.close()
        robot.close()


class Sent:
    def __init__(self, monkeypatch, spec, latency=0.0):
        self.messages, name = [], "serl_chunk_robot.server.streams.arrays.pack"
        monkeypatch.setattr(name, lambda m: self.messages.append(m) or b"")
        self.publisher = FramePublisher(job("top", free_port())._replace(latency=latency), spec)

    def publish(self, image, stamp, number=0):
        self.publisher.publish(Frame(image, stamp, number))
        return self.messages[-1]


@pytest.mark.parametrize("noisy", [True, False])
def test_changed_is_the_moment_of_the_last_picture_that_differed(monkeypatch, noisy):
    sent = Sent(monkeypatch, CameraSpec(4, 5, noisy), latency=0.5)
    image = np.zeros((4, 5, 3), np.uint8)  # a driver that reuses its buffer
    changed = [sent.publish(image, 1.0)["changed"], sent.publish(image, 2.0)["changed"]]
    image[3, 4, 2] = 1
    changed += [sent.publish(image, 3.0)["changed"], sent.publish(image, 4.0)["changed"]]
    assert changed == ([0.5, 0.5, 2.5, 2.5] if noisy else [0.5, 1.5, 2.5, 3.5]), "of a drawn scene they always change"
    sent.publisher.close()


def test_every_reading_repeats_the_keys_of_the_last_two_seconds(monkeypatch):
    clock, sent = iter((0.0, 10.0, 11.9, 12.1)), Sent(monkeypatch, CameraSpec(4, 5))
    sent.publisher.close()
    publisher = ReadingPublisher(sent.publisher._job, lambda: next(clock))
    for keys in ([KeyEvent("left", True, 10.0)], [], []):
        publisher.publish(Sample(None, None, (), 10.0, True), keys)
    publisher.close()
    assert [[list(key) for key in m["keys"]] for m in sent.messages] == [[[0, "left", True, 10.0]]] * 2 + [[]]


@pytest.mark.parametrize(
    ("image", "stamp", "words"),
    [
        (np.zeros((4, 6, 3), np.uint8), 1.0, r"must be uint8\[4, 5, 3\], got uint8\[4, 6, 3\]"),
        (np.zeros((4, 5, 3), np.uint8), 1e12, "clock of `open`"),
    ],
)
def test_a_frame_that_is_not_as_the_contract_says_is_an_error(monkeypatch, image, stamp, words):
    sent = Sent(monkeypatch, CameraSpec(4, 5))
    with pytest.raises(CameraError, match=words):
        sent.publish(image, stamp)
    assert not sent.messages
    sent.publisher.close()
