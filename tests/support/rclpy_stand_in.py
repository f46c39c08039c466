"""A stand-in of rclpy and of the messages of ALOHA's arms: two simulated arms are the rest of the graph.

Messages and requests refuse what those of rosidl refuse: unknown fields, and numbers of another type.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from xs_arm import XsArm

NAMES = ("follower_left", "follower_right")
ANSWERS = {"get_robot_info": "RobotInfo", "get_motor_registers": "RegisterValues", "torque_enable": "TorqueEnable",
           "reboot_motors": "Reboot"}  # fmt: skip


def message(kind: str, /, **fields: Any) -> type:
    """A class as rosidl makes them. `fields`: name -> an example."""

    def init(self: Any, **given: Any) -> None:
        vars(self).update(fields)
        for key, value in given.items():
            assert key in fields, f"{kind} has no field {key}"
            example, values = fields[key], value if isinstance(value, list) else [value]
            wanted = type(example[0] if isinstance(example, list) else example)
            assert {*map(type, values)} == {wanted}, f"{kind}.{key}: {value}"
            setattr(self, key, value)

    return type(kind, (), {"__init__": init})


class End(NamedTuple):
    node_name: str
    node_namespace: str


class Graph:
    """All nodes. `others`: topic -> publishers that are no arm's and not ours."""

    def __init__(self) -> None:
        self.arms = {name: XsArm() for name in NAMES}
        self.others: dict[str, list[End]] = {}
        self.up = False
        self.gone = False  # the arms' nodes
        self.heard: list[tuple[str, Callable[[Any], None]]] = []

    def spin_once(self) -> None:
        for topic, callback in self.heard:
            name, _, kind = topic[1:].partition("/")
            assert kind == "joint_states"
            fields, now = self.arms[name].state()
            stamp = types.SimpleNamespace(sec=int(now), nanosec=int(now % 1 * 1e9))
            if fields and not self.gone:
                callback(types.SimpleNamespace(header=types.SimpleNamespace(stamp=stamp), **fields))


class Future:
    value: Any = None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self.value is not None:
            callback(self)

    def result(self) -> Any:
        return self.value


class Node:
    def __init__(self, graph: Graph, name: str) -> None:
        self._graph, self._name, self._topics = graph, name, []  # type: Graph, str, list[str]
        self.get_name = lambda: name

    def create_publisher(self, msg_type: type, topic: str, qos_profile: int) -> Any:
        self._topics.append(topic)
        graph, arm = self._graph, self._graph.arms[topic.split("/")[1]]
        return types.SimpleNamespace(
            topic_name=topic,
            publish=lambda msg: graph.gone or arm.command(msg.name, msg.cmd),
            get_subscription_count=lambda: 0 if graph.gone else 1,
        )

    def create_subscription(self, msg_type: type, topic: str, callback: Callable[[Any], None], qos: int) -> None:
        self._graph.heard.append((topic, callback))

    def create_client(self, srv_type: type, srv_name: str) -> Any:
        _, robot, service = srv_name.split("/")
        graph, arm = self._graph, self._graph.arms[robot]

        def call_async(request: Any) -> Future:
            future = Future()
            if not arm.hangs:
                assert type(request).__name__ == ANSWERS[service]
                future.value = types.SimpleNamespace(**arm.serve(service, request))
            return future

        return types.SimpleNamespace(
            wait_for_service=lambda timeout_sec=None: not graph.gone,
            call_async=call_async,
            remove_pending_request=lambda future: None,
        )

    def get_publishers_info_by_topic(self, topic_name: str) -> list[End]:
        own = [End(self._name, "/")] if topic_name in self._topics else []
        return [*own, *self._graph.others.get(topic_name, [])]

    def destroy_node(self) -> None:
        self._graph.heard.clear()


class Executor:
    def __init__(self) -> None:
        self._ended = threading.Event()

    def add_node(self, node: Node) -> None:
        self._graph = node._graph

    def spin(self) -> None:
        while not self._ended.wait(0.005):
            self._graph.spin_once()

    def shutdown(self, timeout_sec: float | None = None) -> None:
        self._ended.set()


@contextmanager
def installed() -> Iterator[Graph]:
    graph = Graph()

    def init(*, signal_handler_options: object) -> None:
        assert signal_handler_options == "none", "the server has handlers of its own"
        graph.up = True

    def module(name: str, **names: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        vars(made).update(names)
        return made

    single = {"cmd_type": "", "name": ""}
    requests = {
        "RobotInfo": single,
        "RegisterValues": {**single, "reg": "", "value": 0},
        "TorqueEnable": {**single, "enable": True},
        "Reboot": {**single, "enable": True, "smart_reboot": True},
    }
    kinds = {k: types.SimpleNamespace(Request=message(k, **fields)) for k, fields in requests.items()}
    msg = module(
        "interbotix_xs_msgs.msg",
        JointGroupCommand=message("JointGroupCommand", name="", cmd=[0.0]),
        JointSingleCommand=message("JointSingleCommand", name="", cmd=0.0),
    )
    srv = module("interbotix_xs_msgs.srv", **kinds)
    modules = {
        "rclpy": module("rclpy", ok=lambda: graph.up, init=init, create_node=lambda name: Node(graph, name)),
        "rclpy.executors": module("rclpy.executors", SingleThreadedExecutor=Executor),
        "rclpy.signals": module("rclpy.signals", SignalHandlerOptions=types.SimpleNamespace(NO="none")),
        "interbotix_xs_msgs": module("interbotix_xs_msgs", msg=msg, srv=srv),
        "interbotix_xs_msgs.msg": msg,
        "interbotix_xs_msgs.srv": srv,
        "sensor_msgs": module("sensor_msgs"),
        "sensor_msgs.msg": module("sensor_msgs.msg", JointState=type("JointState", (), {})),
    }
    with patch.dict(sys.modules, modules):
        yield graph
