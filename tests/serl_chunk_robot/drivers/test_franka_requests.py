"""Requests to HIL-SERL's server: commands of a gripper and their lock-out."""

from __future__ import annotations

from franka_driver import Clock

from serl_chunk_robot.drivers.franka_requests import Orders


class Recorded:
    """Takes requests for a server."""

    url = "http://franka/"

    def __init__(self) -> None:
        self.paths: list[str] = []

    def post(self, path: str, body: object = None) -> bytes:
        self.paths.append(path)
        return b""


def test_the_lock_out_lets_one_gripper_request_through_and_then_the_last():
    http, clock = Recorded(), Clock()
    orders = Orders(http, 0.6)
    orders.clock = clock

    def after(seconds: float, place: float) -> list[str]:
        clock.now += seconds
        orders.aim(place)
        orders.act()
        return http.paths

    assert after(0.0, 0.5) == []
    assert after(0.1, 0.26) == [], "a gripper that is as it is"
    assert after(0.1, 0.0) == ["close_gripper"]
    assert after(0.1, 1.0) == after(0.3, 1.0) == ["close_gripper"]
    assert after(0.3, 0.6) == ["close_gripper", "open_gripper"]
    assert after(0.1, 0.1) == after(0.1, 0.8) == ["close_gripper", "open_gripper"], "it is open again already"
    assert after(0.8, 0.8) == ["close_gripper", "open_gripper"]
    orders.slow = True
    assert after(0.1, 0.1)[2:] == ["close_gripper_slow"]
