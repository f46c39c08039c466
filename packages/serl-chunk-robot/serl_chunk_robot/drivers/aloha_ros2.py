"""ALOHA's arms through ROS 2 (Humble, rclpy) and Interbotix's nodes."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any, Callable, Dict, List, Sequence

from serl_chunk_robot.drivers.aloha_arms import ANSWERS, COMMANDS, TYPES, AlohaArms, Gripper
from serl_chunk_robot.drivers.base import DriverError

DEPTH = 10  # set points that wait in the middleware, so that none replaces another one


def aloha_ros2(
    *,
    arms: Sequence[str] = ("follower_left", "follower_right"),
    gripper_closed: float = 0.6197,
    gripper_open: float = 1.6214,
) -> AlohaArms:
    """Make the driver. The defaults are those of ALOHA 2.

    Args:
        arms: names of the followers' nodes.
        gripper_closed, gripper_open: angles of a follower gripper's motor, rad.
    """
    return AlohaArms(Ros2(), arms, Gripper(gripper_closed, gripper_open))


class Ros2:
    """A node of rclpy, with a thread that runs its callbacks: see `aloha_arms.Ros`."""

    def __init__(self) -> None:
        self._ros: Any = None  # the module rclpy
        self._types: Any = None  # the modules of messages and services
        self._node: Any = None
        self._executor: Any = None
        self._joints: Dict[str, Any] = {}
        self._grippers: Dict[str, Any] = {}
        self._clients: Dict[str, Any] = {}

    def open(self, arms: Sequence[str], on_message: Callable[[str, Any, float], None]) -> None:
        try:
            import rclpy
            from interbotix_xs_msgs import msg, srv
            from rclpy.executors import SingleThreadedExecutor
            from rclpy.signals import SignalHandlerOptions
            from sensor_msgs.msg import JointState
        except ImportError as e:
            raise DriverError(
                f"{e.name or e} cannot be imported. Run sudo apt install ros-humble-ros-base, install Interbotix's ROS "
                "2 packages, `source ~/interbotix_ws/install/setup.bash`, and start the server with that Python."
            ) from e
        try:
            if not rclpy.ok():
                rclpy.init(signal_handler_options=SignalHandlerOptions.NO)  # the server has its own
            self._node = rclpy.create_node(f"serl_chunk_robot_{os.getpid()}")
        except Exception as e:
            raise DriverError(f"the ROS node cannot be made ({e})") from e
        self._ros, self._types = rclpy, (msg, srv)
        for arm in arms:
            group, single = (f"/{arm}/commands/{kind}" for kind in COMMANDS[:2])
            self._joints[arm] = self._node.create_publisher(msg.JointGroupCommand, group, DEPTH)
            self._grippers[arm] = self._node.create_publisher(msg.JointSingleCommand, single, DEPTH)
            for service, kind in TYPES.items():
                name = f"/{arm}/{service}"
                self._clients[name] = self._node.create_client(getattr(srv, kind), name)
        for arm in arms:

            def heard(message: Any, arm: str = arm) -> None:
                stamp = message.header.stamp
                on_message(arm, message, float(stamp.sec) + 1e-9 * float(stamp.nanosec))

            self._node.create_subscription(JointState, f"/{arm}/joint_states", heard, 1)
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self._node)
        threading.Thread(target=self._executor.spin, name="aloha-ros2", daemon=True).start()

    def alive(self) -> bool:
        return self._node is not None and bool(self._ros.ok())

    def send(self, arm: str, joints: List[float], gripper: float) -> None:
        msg = self._types[0]
        try:
            self._joints[arm].publish(msg.JointGroupCommand(name="arm", cmd=joints))
            self._grippers[arm].publish(msg.JointSingleCommand(name="gripper", cmd=gripper))
        except Exception as e:  # the middleware's own, of no common kind
            raise DriverError(f"{arm}: the set point was not published ({e})") from e

    def heard_by_none(self, arm: str) -> str:
        publishers = (self._joints[arm], self._grippers[arm])
        return next((p.topic_name for p in publishers if not p.get_subscription_count()), "")

    def others(self, arm: str) -> List[str]:
        topics, own = (f"/{arm}/commands/{kind}" for kind in COMMANDS), self._node.get_name()
        ends = (end for topic in topics for end in self._node.get_publishers_info_by_topic(topic))
        return sorted({f"{end.node_namespace.rstrip('/')}/{end.node_name}" for end in ends if end.node_name != own})

    def call(self, arm: str, service: str, **fields: Any) -> Any:
        name = f"/{arm}/{service}"
        client = self._clients[name]
        if not client.wait_for_service(timeout_sec=ANSWERS / 2):
            return None
        answered = threading.Event()
        try:
            future = client.call_async(getattr(self._types[1], TYPES[service]).Request(**fields))
            future.add_done_callback(lambda _: answered.set())
            if not answered.wait(ANSWERS):
                client.remove_pending_request(future)
                raise DriverError(f"{name}: no answer within {ANSWERS:g} s")
            return future.result()
        except DriverError:
            raise
        except Exception as e:
            raise DriverError(f"{name}: failed ({e})") from e

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(timeout_sec=1.0)
        if self._node is not None:
            with contextlib.suppress(Exception):
                self._node.destroy_node()
        self._node = self._executor = None
