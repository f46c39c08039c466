"""What every driver must do, through its nine methods, with the robot's side of it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator

import numpy as np
import pytest
from driver_rigs import RIGS, Rig, Served

from serl_chunk_robot.drivers import BUILT_IN
from serl_chunk_robot.drivers.base import Driver, DriverError
from serl_chunk_robot.safety.gate import Command

METHODS = [name for name in vars(Driver) if not name.startswith("_")]
SLOWEST = 0.02  # s, of the fastest of many calls: a busy machine delays some of them
STEP = 0.05


SLOW = ("aloha_sim", "aloha_ros1")  # their processes take seconds, and both drivers have tests of their own


@pytest.fixture(params=[pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in RIGS])
def rig(request) -> Iterator[Rig]:
    with RIGS[request.param]() as rig:
        yield rig
        rig.driver.close()


def needed(rig: Rig, *what: str) -> None:
    """Skip where the rig's robot cannot do what a test needs."""
    for each in what:
        if getattr(rig, each) is None:
            pytest.skip(f"its robot has no {each}")


def fastest(call, times: int = 20) -> float:
    taken = []
    for _ in range(times):
        began = time.monotonic()
        call()
        taken.append(time.monotonic() - began)
    return min(taken)


def moved(rig: Rig, by: float = STEP) -> np.ndarray:
    """A set point near the measured pose; grippers keep an opening that both units have."""
    target = np.array(rig.read().q)
    target[rig.joint] += by
    grippers = list(rig.driver.spec().grippers)
    target[grippers] = np.clip(target[grippers], 0.0, 1.0)
    return target


def test_it_has_the_nine_methods_and_a_consistent_spec(rig):
    assert set(BUILT_IN) <= {*RIGS}
    assert len(METHODS) == 9
    for name in METHODS:
        wanted = list(inspect.signature(getattr(Driver, name)).parameters)[1:]
        assert list(inspect.signature(getattr(rig.driver, name)).parameters) == wanted, name
    spec = rig.driver.spec()
    size = len(spec.low)
    assert size == len(spec.high) == len(spec.velocity)
    assert all(low < high and v > 0 for low, high, v in zip(spec.low, spec.high, spec.velocity, strict=True))
    assert [j for first, last in spec.arms for j in range(first, last)] == list(range(size))
    assert set(spec.grippers) <= set(range(size))
    assert dict(spec.state)["q"] == size
    assert spec.state[0][0] == "q"
    assert 50 <= spec.rate <= 500
    assert spec == rig.driver.spec(), "spec() opens nothing, and changes nothing"
    for given in (spec.acceleration, spec.jerk, spec.home):
        assert len(given) in (0, size)
    rig.driver.close()  # what was never opened


def test_connecting_moves_nothing_and_changes_no_torque(rig):
    rig.connect()
    before = rig.read()
    torque = rig.has_torque()
    spec = rig.driver.spec()
    assert before.q.shape == before.dq.shape == before.effort.shape == (len(spec.low),)
    assert {a.dtype for a in (before.q, before.dq, before.effort)} == {np.dtype(np.float64)}
    assert (before.q >= np.array(spec.low) - 0.05).all()
    assert (before.q <= np.array(spec.high) + 0.05).all()
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        after = rig.read()
    np.testing.assert_allclose(after.q, before.q, atol=0.01)
    assert rig.has_torque() == torque == after.torque
    if rig.commands is not None:
        assert not rig.commands()


def test_reading_waits_for_nothing_and_stamps_do_not_go_back(rig):
    rig.connect()
    began, stamps = time.monotonic(), []
    assert fastest(lambda: stamps.append(rig.driver.read().stamp)) < SLOWEST
    while time.monotonic() - began < 0.2:
        stamps.append(rig.read().stamp)
        assert stamps[-1] <= time.monotonic() + 1e-6, "a stamp of the future"
        time.sleep(0.005)
    # The shortest transit becomes known message by message, and moves stamps back by as much.
    assert np.diff(stamps).min() > -0.02
    assert stamps[-1] > began
    assert rig.read(lambda reading: time.monotonic() - reading.stamp < 0.1)


def test_a_silent_link_gets_older(rig):
    needed(rig, "silence")
    rig.connect()
    rig.read()
    rig.silence()
    reading = rig.read(lambda reading: time.monotonic() - reading.stamp > 0.15)
    assert fastest(rig.driver.read, 5) < SLOWEST
    assert abs(rig.driver.read().stamp - reading.stamp) < 0.1


def test_a_set_point_arrives_once_and_whole(rig):
    rig.ready()
    target = moved(rig)
    rig.driver.command(target, 0.02)
    reading = rig.read(lambda reading: abs(reading.q[rig.joint] - target[rig.joint]) < 0.02)
    joints = ~np.isin(np.arange(len(target)), rig.driver.spec().grippers)
    np.testing.assert_allclose(reading.q[joints], target[joints], atol=0.05)
    if rig.commands is not None:
        sent = []
        for k in range(20):
            sent.append(target + 0.001 * k * joints)
            rig.driver.command(sent[-1], 0.02)
            rig.pump()
            time.sleep(0.002)
        until = time.monotonic() + 5
        while not np.allclose(rig.commands()[-1], sent[-1], atol=1e-5) and time.monotonic() < until:
            rig.pump()
        arrived, sent = np.array(rig.commands()), np.array([target, *sent])
        if not rig.each_arrives:  # but whole, and in their order
            sent = sent[np.sort(np.abs(sent[:, None] - arrived).max(axis=2).argmin(axis=0))]
        np.testing.assert_allclose(arrived, sent, atol=1e-5)


def test_what_is_no_set_point_is_refused_and_nothing_is_sent(rig):
    rig.ready()
    target, last = moved(rig), np.arange(len(rig.driver.spec().low)) == len(rig.driver.spec().low) - 1
    wrongs = [(np.where(last, x, target), "Nothing was sent") for x in (np.nan, np.inf)]
    wrongs.append((target[:-1], "Nothing was sent"))
    if rig.beyond is not None:  # no arm moves, also not that within its limits
        joint, place, named = rig.beyond
        wrongs.append((np.where(np.arange(len(target)) == joint, place, target), named))
    for wrong, named in wrongs:
        with pytest.raises(DriverError, match=named):
            rig.driver.command(wrong, 0.02)
    before = rig.read().q
    rig.driver.hold()
    until = time.monotonic() + 0.05
    while time.monotonic() < until:
        after = rig.read().q
    np.testing.assert_allclose(after, before, atol=0.01)
    if rig.commands is not None:
        assert not rig.commands()


def test_it_holds_and_answers_stops_of_all_levels_with_torque(rig):
    rig.ready()
    target = moved(rig)
    rig.driver.command(target, 0.02)
    rig.driver.hold()
    rig.read(lambda reading: abs(reading.q[rig.joint] - target[rig.joint]) < 0.02)
    for level in (0, 1, 2):
        assert rig.read(lambda reading, level=level: rig.driver.stop("the test ends", level)).torque
        pose = rig.read().q
        time.sleep(0.02)
        np.testing.assert_allclose(rig.read().q, pose, atol=0.02)
    assert rig.has_torque()


def test_torque_goes_off_and_comes_back_where_the_arms_are(rig):
    rig.ready()
    with pytest.raises(DriverError, match=r"stiffnes: unknown\. Valid: .*torque"):
        rig.driver.set("stiffnes", 1)
    if not rig.torque_off:
        with pytest.raises(DriverError, match="torque"):
            rig.driver.set("torque", False)
        assert rig.has_torque()
        return
    assert fastest(lambda: rig.driver.set("torque", False), 1) < 0.2
    rig.read(lambda reading: not reading.torque)
    assert not rig.has_torque()
    assert fastest(rig.driver.clear_faults, 1) < 0.2
    pose = rig.read(lambda reading: reading.torque and not reading.faults).q
    assert rig.has_torque()
    time.sleep(0.05)
    np.testing.assert_allclose(rig.read().q, pose, atol=0.02)


def test_a_fault_of_the_robot_is_reported_until_it_is_cleared(rig):
    needed(rig, "fault")
    rig.ready()
    text = rig.fault()
    reading = rig.read(lambda reading: bool(reading.faults))
    assert any(text in fault for fault in reading.faults), reading.faults
    assert all("\n" not in fault for fault in reading.faults)
    if hasattr(rig, "repair"):
        rig.repair()
    rig.driver.clear_faults()
    rig.read(lambda reading: reading.torque and not reading.faults)
    rig.driver.command(moved(rig), 0.02)


def test_a_robot_that_is_gone_takes_no_set_point(rig):
    needed(rig, "vanish")
    rig.ready()
    target = moved(rig)
    rig.vanish()

    def command_for_a_while() -> None:
        until = time.monotonic() + 5
        while time.monotonic() < until:
            rig.driver.command(target, 0.02)
            time.sleep(0.01)

    with pytest.raises(DriverError, match="no node takes commands"):
        command_for_a_while()
    assert rig.read(lambda reading: time.monotonic() - reading.stamp > 0.1)
    assert not rig.driver.stop("gone", 1)


def test_the_loop_clears_it_drives_it_and_stops_it(rig):
    rig.connect()
    served = Served(rig)
    served.arm()
    target = moved(rig, 0.02)
    number = 0

    def there() -> bool:
        nonlocal number
        number += 1
        served.loop.command(Command(target, number, served.loop.machine.generation), time.monotonic())
        return abs(rig.driver.read().q[rig.joint] - target[rig.joint]) < 0.01

    served.run(there)
    assert served.loop.machine.state == "RUN", served.loop.machine.word
    served.loop.request("stop", "any", "B", time.monotonic())
    served.run(lambda: served.loop.machine.state == "STOPPED")
    served.run(lambda: served.loop._stopping.answered)
    assert rig.has_torque()
    rig.driver.close()
    if rig.commands is not None:
        assert rig.has_torque(), "closing leaves torque on"
    rig.driver.close()
