"""The driver to copy, against a stand-in of its arm that speaks UDP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import driver_rigs
import pytest
from udp_arm import POSE

from serl_chunk_robot.drivers import sample
from serl_chunk_robot.drivers.base import DriverError, Reading
from serl_chunk_robot.drivers.sample import UdpArm
from serl_chunk_robot.robot_file.config import checked, load, load_driver

FILE = Path(sample.__file__)


@pytest.fixture
def rig() -> Iterator[driver_rigs.SampleRig]:
    with driver_rigs.sample() as rig:
        assert isinstance(rig, driver_rigs.SampleRig)
        yield rig
        rig.driver.close()


@pytest.fixture
def driver(rig) -> UdpArm:
    """A driver that is connected."""
    rig.connect()
    rig.arm.socket.settimeout(5)
    return rig.driver


@pytest.fixture
def arm(rig):
    return rig.arm


def newest(driver: UdpArm, when: Callable[[Reading], bool] = lambda reading: True) -> Reading:
    """Read until a state is there that `when` is for: a datagram takes its time."""
    until = time.monotonic() + 5
    while not when(reading := driver.read()):
        assert time.monotonic() < until
        time.sleep(0.001)
    return reading


def test_a_file_of_less_than_100_lines_next_to_the_robots_makes_it(tmp_path, rig):
    assert len(FILE.read_text().splitlines()) < 100
    (tmp_path / "arm.py").write_text(FILE.read_text())
    path = tmp_path / "robot.toml"
    path.write_text(f'name = "cell"\n[driver]\nname = "arm.py:UdpArm"\nport = {rig.arm.port}\n')
    file = load(path)
    rig.driver = load_driver(file)
    rig.connect()
    checked(file, rig.driver.spec(), rig.driver.read().q)


def test_a_stop_is_answered_by_its_own_number(arm, driver):
    for level, number in ((0, 1), (0, 2), (1, 3)):
        assert not driver.stop("because", level)
        assert arm.take() == {"stop": level, "number": number}
        assert not driver.stop("because", level), "what was not read is not known"
        assert arm.take()["number"] == number
        arm.q = POSE + 0.01 * number
        arm.send()
        reading = newest(driver, lambda reading: reading.q[0] == 0.01 * number)  # noqa: B023
        assert driver.stop("because", level)
        arm.take()
    assert reading.faults == ("stopped by its own means",)
    arm.mode, arm.torque = "current", False
    arm.send()
    assert "current" in str(newest(driver, lambda reading: not reading.torque).faults)


@pytest.mark.parametrize("datagram", [b"", b"{", b"[]", b'{"q": [0]}', b'{"q": "x"}', b"\xff"])
def test_what_is_no_state_is_an_error(arm, driver, datagram):
    arm.send(datagram)
    with pytest.raises(DriverError):
        newest(driver, lambda reading: False)


def test_an_arm_that_is_gone_is_an_error(arm, driver):
    arm.socket.close()
    driver.command(POSE, 0.005)  # a refusal comes back
    with pytest.raises(DriverError, match="gone"):
        newest(driver, lambda reading: False)
    with pytest.raises(DriverError, match=str(arm.port)):
        UdpArm(port=arm.port).connect(time.monotonic)
