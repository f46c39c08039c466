"""The package's names, the scripts in its README, and the package under Python 3.8 (ROS 1), where one is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from robot_served import HERE, served

import serl_chunk_robot
from serl_chunk_robot import Camera, Driver, DriverSpec, InputDevice, Reading, RobotClient, open_robot
from serl_chunk_robot.errors import ConfigError

README = Path(serl_chunk_robot.__file__).resolve().parents[1] / "README.md"
SCRIPTS = {
    text.split("import ")[1].split()[0]: text for text in re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
}


def test_names_are_imported_on_first_use():
    code = (
        "import sys, serl_chunk_robot; print('numpy' in sys.modules, serl_chunk_robot.Reading, dir(serl_chunk_robot))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.startswith("False <class")
    assert "open_robot" in done.stdout
    assert all((Camera, Driver, DriverSpec, InputDevice, Reading, RobotClient))
    with pytest.raises(AttributeError, match="no attribute 'Robot'"):
        _ = serl_chunk_robot.Robot


def test_the_script_of_the_readme_reads_a_served_robot(capsys):
    with served() as robot:
        exec(SCRIPTS["RobotClient"].replace("127.0.0.1:5600", f"{HERE}:{robot.port}"), {})
    assert " STOPPED [" in capsys.readouterr().out


def test_the_script_of_the_readme_opens_the_robot_of_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "robot.toml").write_text('name = "cell"\ndriver = "fake"\n')
    exec(SCRIPTS["open_robot"], {})
    assert capsys.readouterr().out.startswith("fake arms [")
    with open_robot("robot.toml") as arms, pytest.raises(ConfigError, match="served already"), open_robot("robot.toml"):
        assert arms.read().torque


ROOT = Path(__file__).resolve().parents[2] / "packages" / "serl-chunk-robot"

IMPORT_ALL = """
import importlib, importlib.util, pathlib, sys, unittest.mock
assert sys.version_info[:2] == (3, 8)
for name in [n for n in ("numpy", "zmq", "msgpack", "msgpack_numpy", "tomli") if importlib.util.find_spec(n) is None]:
    sys.modules[name] = sys.modules[name + ".utils"] = unittest.mock.MagicMock(name=name)
root = pathlib.Path(sys.argv[1])
for file in sorted((root / "serl_chunk_robot").rglob("*.py")):
    name = ".".join(file.relative_to(root).with_suffix("").parts)
    importlib.import_module(name[: -len(".__init__")] if name.endswith(".__init__") else name)
    print(name)
vendors = "cv2", "draccus", "lerobot", "pyrealsense2", "rclpy", "rospy", "serl_chunk", "trossen_arm"
found = [name for name in vendors if name in sys.modules]
assert not found, found
"""

USE = """
import numpy as np
from serl_chunk_robot.main import main
from serl_chunk_robot.wire import arrays, codec, curve, sockets
values = {"q": np.arange(6, dtype=np.float32).reshape(2, 3).T, "n": np.int64(3), "names": ["a", "b"]}
got = arrays.unpack(arrays.pack(values), 1000)
assert np.array_equal(got.pop("q"), values["q"]) and got == {"n": 3, "names": ["a", "b"]}
message = codec.decode(codec.encode("k", {"a": 1}, {"q": np.zeros(5000)}), codec.Limits(1 << 20, 8))
assert message.header == {"a": 1} and message.arrays["q"].shape == (5000,)
import zmq
context = zmq.Context()
server, robot = (sockets.make_socket(context, kind, 1 << 20) for kind in (zmq.ROUTER, zmq.DEALER))
port = server.bind_to_random_port("tcp://127.0.0.1")
sockets.connect(robot, "127.0.0.1", port)
assert robot.poll(5000, zmq.POLLOUT) and sockets.try_send(robot, [b"hello"])
assert server.poll(5000) and [f.bytes for f in sockets.try_receive(server)][1:] == [b"hello"]
waker = sockets.Waker()
waker.wake()
waker.drain()
waker.close()
assert curve.Pair.of_secret(curve.Pair.new().secret) and sockets.is_loopback("::1")
context.destroy(linger=0)
assert main([]) == 0
"""


def run(python: str, code: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ.get("PATH", ""), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-c", code, str(ROOT)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def python() -> str:
    """An interpreter: the one that SERL_CHUNK_PYTHON38 names, python3.8, or one of pyenv."""
    found = [os.environ.get("SERL_CHUNK_PYTHON38"), shutil.which("python3.8")]
    found += map(str, sorted((Path.home() / ".pyenv" / "versions").glob("3.8.*/bin/python")))
    for interpreter in filter(None, found):
        if run(interpreter, "import sys; assert sys.version_info[:2] == (3, 8)").returncode == 0:
            return interpreter
    pytest.skip("no Python 3.8 here: set SERL_CHUNK_PYTHON38 to one")


def test_every_module_is_imported(python):
    """A stand-in is there for each dependency that the interpreter lacks. No vendor's library is imported."""
    done = run(python, IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(list((ROOT / "serl_chunk_robot").rglob("*.py")))


def test_messages_and_sockets_work(python):
    if run(python, "import numpy, zmq, msgpack, msgpack_numpy").returncode:
        pytest.skip("this Python 3.8 lacks numpy, pyzmq, msgpack or msgpack-numpy")
    done = run(python, USE)
    assert done.returncode == 0, done.stderr
