"""The process of two simulated ALOHA arms: a node of rospy, controlled by lines of JSON on its standard input.

["reset"], ["get", ARM, NAME] and ["put", ARM, NAME, VALUE] are about an `XsArm`; each is answered by a line.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from functools import partial

import rospy
from interbotix_xs_msgs import msg, srv
from sensor_msgs.msg import JointState
from xs_arm import XsArm

NAMES = ("puppet_left", "puppet_right")
SERVICES = {"get_robot_info": srv.RobotInfo, "get_motor_registers": srv.RegisterValues,
            "torque_enable": srv.TorqueEnable, "reboot_motors": srv.Reboot}  # fmt: skip


def publish(arms: list[XsArm], publishers: list[rospy.Publisher]) -> None:
    due = time.monotonic()
    while not rospy.is_shutdown():
        for arm, publisher in zip(arms, publishers, strict=True):
            fields, stamp = arm.state()
            if fields:
                message = JointState(**fields)
                message.header.stamp = rospy.Time.from_sec(stamp)
                publisher.publish(message)
        due = max(due + 0.01, time.monotonic())
        time.sleep(max(due - time.monotonic(), 0.0))


def answer(arm: XsArm, service: str, request: object) -> object:
    while arm.hangs:
        time.sleep(0.01)
    return SERVICES[service]._response_class(**arm.serve(service, request))


def main() -> None:
    rospy.init_node("xs_sdk_sim", disable_signals=True)
    arms = [XsArm() for _ in NAMES]
    publishers = []
    for name, arm in zip(NAMES, arms, strict=True):
        publishers.append(rospy.Publisher(f"/{name}/joint_states", JointState, queue_size=1, tcp_nodelay=True))
        for topic, kind in (("joint_group", msg.JointGroupCommand), ("joint_single", msg.JointSingleCommand)):
            rospy.Subscriber(
                f"/{name}/commands/{topic}", kind, lambda m, arm=arm: arm.command(m.name, m.cmd), tcp_nodelay=True
            )
        for service, of in SERVICES.items():
            rospy.Service(f"/{name}/{service}", of, partial(answer, arm, service))
    threading.Thread(target=publish, args=(arms, publishers), daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        op, *values = json.loads(line)
        result = None
        if op == "reset":
            for arm in arms:
                arm.reset()
        elif op == "get":
            result = getattr(arms[values[0]], values[1])
        else:
            setattr(arms[values[0]], *values[1:])
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
