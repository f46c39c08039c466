"""A real ROS 1 for tests: rosmaster, simulated ALOHA arms as a node, and rospy in this process.

The environment's SERL_CHUNK_ROS1 names a folder into which Debian's packages of ROS were unpacked: `.ci/run` does so.
Without it, a workspace that was sourced does, where this Python can import its packages. The master is always one of
its own, on a free port: no node of the workspace's own master is reached.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from robot_served import free_port

ENVIRONMENT = "SERL_CHUNK_ROS1"
NEEDED = ("rospy", "rosmaster", "rosgraph", "genpy", "sensor_msgs")
NODE = Path(__file__).parent / "ros1_arms.py"
MESSAGES = {  # fields as the public documentation of interbotix_xs_sdk lists them
    "msg/JointGroupCommand": "string name\nfloat32[] cmd\n",
    "msg/JointSingleCommand": "string name\nfloat32 cmd\n",
    "srv/TorqueEnable": "string cmd_type\nstring name\nbool enable\n---\n",
    "srv/Reboot": "string cmd_type\nstring name\nbool enable\nbool smart_reboot\n---\n",
    "srv/RegisterValues": "string cmd_type\nstring name\nstring reg\nint32 value\n---\nint32[] values\n",
    "srv/RobotInfo": "string cmd_type\nstring name\n---\nstring mode\nstring profile_type\nstring[] joint_names\n"
    "int16[] joint_ids\nfloat32[] joint_lower_limits\nfloat32[] joint_upper_limits\n"
    "float32[] joint_velocity_limits\nfloat32[] joint_sleep_positions\nint16[] joint_state_indices\n"
    "int16 num_joints\nstring[] name\n",
}


PACKAGES = [Path(os.environ[ENVIRONMENT], "usr/lib/python3/dist-packages")] if os.environ.get(ENVIRONMENT) else []


def missing() -> str:
    """Return why there is no ROS 1 here; empty if there is."""
    if PACKAGES:
        return "" if (PACKAGES[0] / "rospy").is_dir() else f"no ROS 1 here: {PACKAGES[0]} has no rospy"
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        return f"no ROS 1 here: {ENVIRONMENT} names no folder (see .ci/run), and Python has no {lacking[0]}"
    return ""


class Ros:
    """A master and the node of two arms, whose attributes tests set. One for the whole test process.

    Args:
        errors: for what the node writes to its standard error; by default, this process's.
    """

    def __init__(self, errors: IO[bytes] | None = None) -> None:
        self._errors = errors
        self.folder = Path(tempfile.mkdtemp(prefix="serl_chunk_ros1_"))
        atexit.register(self.end)
        for place in (*PACKAGES, self.folder):
            sys.path.append(str(place))
        self._generate()
        port = free_port(1)
        inherited = filter(None, [os.environ.get("PYTHONPATH", "")])
        self.environment = {
            "ROS_MASTER_URI": f"http://127.0.0.1:{port}",
            "ROS_IP": "127.0.0.1",
            "ROS_HOME": str(self.folder),
            "PYTHONPATH": os.pathsep.join(map(str, (*PACKAGES, self.folder, NODE.parent, *inherited))),
        }
        if PACKAGES:  # as a workspace that is sourced has it
            self.environment["ROS_ETC_DIR"] = str(Path(os.environ[ENVIRONMENT]) / "etc" / "ros")
        os.environ.update({k: v for k, v in self.environment.items() if k != "PYTHONPATH"})
        code = f"import rosmaster; rosmaster.rosmaster_main(['rosmaster', '--core', '-p', '{port}'])"
        self.master = self.start("-c", code)
        self.arms: Any = None
        from rosgraph import is_master_online

        until = time.monotonic() + 10
        while not is_master_online(self.environment["ROS_MASTER_URI"]):
            assert time.monotonic() < until, "rosmaster does not answer"
            time.sleep(0.02)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments], env={**os.environ, **self.environment}, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL if arguments[0] == "-c" else self._errors,
        )  # fmt: skip

    def need_arms(self) -> None:
        """Start the arms' node if it does not run, else put the arms back."""
        if self.arms is None or self.arms.poll() is not None:
            self.arms = self.start(str(NODE))
            assert self.arms.stdout.readline() == "ready\n"
        self.ask("reset")

    def ask(self, *request: Any) -> Any:
        """Send a request to the arms' process: see ros1_arms.py."""
        self.arms.stdin.write(json.dumps(request) + "\n")
        self.arms.stdin.flush()
        return json.loads(self.arms.stdout.readline())

    def get(self, arm: int, name: str) -> Any:
        return self.ask("get", arm, name)

    def put(self, arm: int, name: str, value: Any) -> None:
        self.ask("put", arm, name, value)

    def kill_arms(self) -> None:
        """Kill -9, as a crash or a pulled power plug."""
        self.arms.kill()
        self.arms.wait(10)

    def end(self) -> None:
        for process in (self.arms, self.master):
            if process is not None:
                process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _generate(self) -> None:
        import genpy.generate_initpy
        import genpy.generator

        package = self.folder / "interbotix_xs_msgs"
        for kind, generator in (("msg", genpy.generator.MsgGenerator()), ("srv", genpy.generator.SrvGenerator())):
            out, files = package / kind, []
            out.mkdir(parents=True)
            for name in (name for name in MESSAGES if name.startswith(kind)):
                files.append(str(self.folder / f"{Path(name).name}.{kind}"))
                Path(files[-1]).write_text(MESSAGES[name])
            generator.generate_messages("interbotix_xs_msgs", files, str(out), {})
            genpy.generate_initpy.write_modules(str(out))
        (package / "__init__.py").touch()


@functools.cache
def ros() -> Ros:
    logger_class, handlers = logging.getLoggerClass(), list(logging.getLogger().handlers)
    made = Ros()
    import rospy

    rospy.init_node("serl_chunk_robot", anonymous=True, disable_signals=True)  # as the driver does
    # rospy set the logging of the whole process up: other tests have their own.
    logging.setLoggerClass(logger_class)
    logging.getLogger().handlers[:] = handlers
    return made
