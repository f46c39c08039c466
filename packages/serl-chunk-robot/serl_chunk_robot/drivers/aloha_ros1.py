"""ALOHA's arms through ROS 1 (Noetic, rospy) and Interbotix's nodes."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import Any, Callable, Dict, Iterator, List, Sequence
from urllib.parse import urlparse

from serl_chunk_robot.drivers.aloha_arms import ANSWERS, COMMANDS, TYPES, AlohaArms, Gripper
from serl_chunk_robot.drivers.base import DriverError

NODE = "serl_chunk_robot"
REACHES = 0.5  # s, of a node or the master
OF_ROS = ("rosgraph", "rosout", "rospy")  # loggers of ROS itself


def aloha_ros1(
    *,
    arms: Sequence[str] = ("puppet_left", "puppet_right"),
    gripper_closed: float = -0.6213,
    gripper_open: float = 1.4910,
) -> AlohaArms:
    """Make the driver. The defaults are those of the first ALOHA.

    Args:
        arms: names of the followers' nodes.
        gripper_closed, gripper_open: angles of a follower gripper's motor, rad.
    """
    return AlohaArms(Ros1(), arms, Gripper(gripper_closed, gripper_open))


class Ros1:
    """A node of rospy: see `aloha_arms.Ros`."""

    def __init__(self) -> None:
        self._ros: Any = None  # the module rospy, once the node is there
        self._graph: Any = None  # the module rosgraph
        self._services: Any = None
        self._topics: List[Any] = []  # all that is to be unregistered
        self._joints: Dict[str, Any] = {}
        self._grippers: Dict[str, Any] = {}

    def open(self, arms: Sequence[str], on_message: Callable[[str, Any, float], None]) -> None:
        try:
            import rosgraph
            import rospy
            from interbotix_xs_msgs import msg, srv
            from sensor_msgs.msg import JointState
        except ImportError as e:
            raise DriverError(
                f"{e.name or e} cannot be imported. Run sudo apt install ros-noetic-ros-base, install Interbotix's ROS "
                "1 packages, `source ~/interbotix_ws/devel/setup.bash`, and start the server with that Python."
            ) from e
        uri = rosgraph.get_master_uri()
        if not _reachable(uri):  # rospy would wait for it without end
            raise DriverError(
                f"{uri}: no ROS master answers. Start roscore or the arms' launch file, or set ROS_MASTER_URI."
            )
        try:
            # A name of its own: the master ends a node whose name another one takes.
            with _logging_kept():
                rospy.init_node(NODE, anonymous=True, disable_signals=True)
        except Exception as e:
            raise DriverError(f"the ROS node cannot be made ({e})") from e
        self._ros, self._graph, self._services = rospy, rosgraph, srv
        for arm in arms:
            group, single = (f"/{arm}/commands/{kind}" for kind in COMMANDS[:2])
            # With a queue a thread sends: a node that hangs must not block the loop.
            self._joints[arm] = rospy.Publisher(group, msg.JointGroupCommand, queue_size=10, tcp_nodelay=True)
            self._grippers[arm] = rospy.Publisher(single, msg.JointSingleCommand, queue_size=10, tcp_nodelay=True)
            self._topics += [self._joints[arm], self._grippers[arm]]
        for arm in arms:
            self._topics.append(rospy.Subscriber(
                f"/{arm}/joint_states", JointState,
                lambda message, arm=arm: on_message(arm, message, message.header.stamp.to_sec()),  # type: ignore[misc]
                queue_size=1, tcp_nodelay=True,
            ))  # fmt: skip

    def alive(self) -> bool:
        return self._ros is not None and not self._ros.is_shutdown()

    def send(self, arm: str, joints: List[float], gripper: float) -> None:
        try:
            self._joints[arm].publish("arm", joints)
            self._grippers[arm].publish("gripper", gripper)
        except Exception as e:  # rospy's own, of no common kind
            raise DriverError(f"{arm}: the set point was not published ({e})") from e

    def heard_by_none(self, arm: str) -> str:
        publishers = (self._joints[arm], self._grippers[arm])
        return next((p.resolved_name for p in publishers if not p.get_num_connections()), "")

    def others(self, arm: str) -> List[str]:
        topics = {f"/{arm}/commands/{kind}" for kind in COMMANDS}
        master = self._master()
        try:
            nodes = {node for topic, its in master.getSystemState()[0] if topic in topics for node in its}
        except (OSError, self._graph.MasterException) as e:
            raise DriverError(f"the ROS master does not answer ({e})") from e

        def runs(node: str) -> bool:  # the master knows also those that were killed
            with contextlib.suppress(OSError, self._graph.MasterException):
                return _reachable(master.lookupNode(node))
            return False

        return list(filter(runs, nodes - {self._ros.get_name()}))

    def call(self, arm: str, service: str, **fields: Any) -> Any:
        name, kind = f"/{arm}/{service}", getattr(self._services, TYPES[service])
        try:
            uri = self._master().lookupService(name)
        except (OSError, self._graph.MasterException):
            return None
        if not _reachable(uri):  # of a node that was killed
            raise DriverError(f"{name}: its node is gone. Launch the arms' nodes.")
        done: List[Any] = []

        def ask() -> None:
            try:
                done.append(self._ros.ServiceProxy(name, kind)(**fields))
            except Exception as e:
                done.append(DriverError(f"{name}: failed ({e})"))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(ANSWERS)
        if not done:
            raise DriverError(f"{name}: no answer within {ANSWERS:g} s")
        if isinstance(done[0], DriverError):
            raise done[0]
        return done[0]

    def close(self) -> None:
        # The process keeps its node: rospy makes only one. Without topics it commands nothing.
        for topic in self._topics:
            with contextlib.suppress(Exception):
                topic.unregister()
        self._topics, self._ros = [], None

    def _master(self) -> Any:
        return self._graph.Master(self._ros.get_name())


@contextlib.contextmanager
def _logging_kept() -> Iterator[None]:
    """Keep the process's logging as it is: rospy replaces it by ROS's, which then gets the lines of ROS alone."""
    root = logging.getLogger()
    kind, handlers, level = logging.getLoggerClass(), list(root.handlers), root.level
    try:
        yield
    finally:
        for name in OF_ROS:
            of_ros = logging.getLogger(name)
            of_ros.handlers += [each for each in root.handlers if each not in handlers]
            of_ros.propagate = False
        logging.setLoggerClass(kind)
        root.handlers[:] = handlers
        root.setLevel(level)


def _reachable(uri: str) -> bool:
    """Whether a program listens at the address of a URI."""
    at = urlparse(uri)
    with contextlib.suppress(OSError, ValueError):
        socket.create_connection((at.hostname or "", at.port or 0), timeout=REACHES).close()
        return True
    return False
