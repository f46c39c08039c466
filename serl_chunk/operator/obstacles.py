"""Why a robot cannot begin a motion, and what the operator does about it."""

from __future__ import annotations

from serl_chunk.actor.interfaces import RobotRequests
from serl_chunk.console.view import Obstacle
from serl_chunk.operator.devices import OperatorDevices
from serl_chunk.robots.base import RobotEnv


def motion_obstacles(
    robot: RobotRequests | None, env: RobotEnv | None, devices: OperatorDevices
) -> tuple[Obstacle, ...]:
    """Return why no motion may begin: a silent server, cameras and devices."""
    of_robot = () if env is None else (Obstacle(*each) for each in env.hindrances())
    silent = robot is not None and robot.silent
    gone = (Obstacle("the robot's server is silent", "look at its log, and start it again"),) if silent else ()
    if robot is not None and robot.stalled and not silent:
        gone = (Obstacle(f"the robot's server is STALLED ({robot.why})", "look at its log, and start it again"),)
    return (*gone, *of_robot, *devices.obstacles())


def robot_obstacles(robot: RobotRequests | None, stopped: bool, *, clear: str, go: str) -> tuple[Obstacle, ...]:
    """Return what the state of a robot hinders.

    Args:
        robot: None: it is in this process.
        stopped: by its server, or by the operator.
        clear, go: keys, for remedies.
    """
    if stopped:
        why = robot.why if robot is not None and robot.stopped else "by the operator"
        remedy = f"look at the cell, then press {clear} and {go}"
        if robot is not None and not robot.may_clear:
            remedy = "look at the cell; an operator's machine runs: serl-chunk robot clear"
        return (Obstacle(f"the robot is STOPPED ({why})", remedy), *_refusal(robot))
    if robot is not None and robot.held:
        remedy = f"look at the cell, then press {go} at the terminal or the page"
        if not robot.may_clear:
            remedy = "look at the cell; an operator's machine runs: serl-chunk robot go"
        return (Obstacle(f"the robot is held by {robot.shown.held_by}", remedy), *_refusal(robot))
    if robot is not None and robot.moving and robot.waiting:
        return (Obstacle("the reset waits for the scene", f"arrange it, then press {go}"), *_refusal(robot))
    return _refusal(robot)


def _refusal(robot: RobotRequests | None) -> tuple[Obstacle, ...]:
    if robot is None or not robot.refused:
        return ()
    return (Obstacle(f"the robot's server refused it: {robot.refused}", "look at the robot, and press again"),)
