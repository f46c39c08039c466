"""robot.toml: what a short one gives, what a long one sets, what is refused; views of a camera's pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from errors import naming
from hypothesis import given
from hypothesis import strategies as st
from robot_limits import GRIPPERS, HIGH, HOME, LOW, J, viperx

import serl_chunk_robot
from serl_chunk_robot.control.motions import Reset, park
from serl_chunk_robot.drivers.camera import CameraSpec
from serl_chunk_robot.drivers.fake import viperx_arms
from serl_chunk_robot.errors import ConfigError
from serl_chunk_robot.robot_file.camera_views import FLIPS, TURNS, View
from serl_chunk_robot.robot_file.config import RobotFile, checked, load, load_driver
from serl_chunk_robot.robot_file.ranges import PROFILE as PROFILE_RANGES
from serl_chunk_robot.robot_file.ranges import RANGES
from serl_chunk_robot.safety.gate import Gate
from serl_chunk_robot.server.serve import Motions

README = Path(serl_chunk_robot.__file__).parents[1] / "README.md"
SHORT = 'name = "cell_3"\ndriver = "fake"\n'
LONG = README.read_text().partition("```toml\n")[2].partition("```")[0]
CAMERAS = """
[[camera]]
name = "top"
driver = "fake"

[[camera]]
name = "wrist"
driver = "my_camera.py:MyCamera"
height = 60
width = 80
"""
VIEW = '[[camera]]\nname = "gripper"\nof = "wrist"\n'
CAMERA = """
from serl_chunk_robot.drivers.camera import CameraSpec
from serl_chunk_robot.drivers.fake_camera import FakeCamera

class MyCamera(FakeCamera):
    pass

class Large(MyCamera):
    def spec(self):
        return CameraSpec(60, 5000)


class Half:
    def spec(self): ...
"""
POSES = 'name = "a"\n[driver]\nname = "my_arm.py:PoseArms"\n'
ARM = """
from dataclasses import dataclass
import numpy as np
from serl_chunk_robot.drivers.base import DriverSpec
from serl_chunk_robot.drivers.fake import FakeArms, viperx_arms

@dataclass
class Unused:
    x: "int" = 0

class MyArm(FakeArms):
    def __init__(self, lag=0.02, needed=None):
        twin = viperx_arms(lag=lag)
        super().__init__(twin.spec(), twin.q, lag=lag)

class PoseArms(FakeArms):
    def __init__(self):
        low, high = (0.2, -0.4, 0.05, 1.5, -1.0, -2.5, 0.0) * 2, (0.7, 0.4, 0.6, 4.5, 1.0, 2.5, 1.0) * 2
        velocity = (0.5, 0.5, 0.5, 1.5, 1.5, 1.5, 10.0) * 2
        spec = DriverSpec("poses", low, high, velocity, (6, 13), ((0, 7), (7, 14)), (("q", 14),), targets="poses")
        super().__init__(spec, np.tile([0.4, 0.0, 0.2, 3.0, 0.0, 0.5, 0.5], 2))

class Needs(MyArm):
    def __init__(self, serial):
        super().__init__()

class Half:
    def spec(self): ...

def Broken():
    raise OSError("no such bus")

def differs(**fields):
    class Other(MyArm):
        def spec(self):
            return super().spec()._replace(**fields)
    return Other

Stuck, Fast, Weak = differs(velocity=(0.0,) * 14), differs(velocity=(2000.0,) * 14), differs(effort=(0.0,) * 14)
Bare, Wrenches, Posed = differs(grippers=()), differs(targets="wrenches"), differs(targets="poses", grippers=())
Degrees, Endless = differs(low=(-180.0,) * 14), differs(high=(float("inf"),) * 14)
"""


def written(folder: Path, text: str) -> Path:
    (folder / "keys").mkdir(exist_ok=True)
    (folder / "my_arm.py").write_text(ARM)
    (folder / "my_camera.py").write_text(CAMERA)
    (folder / "bad.py").write_text("import no_such_module\n")
    (folder / "robot.toml").write_text(text)
    return folder / "robot.toml"


def of(folder: Path, text: str) -> RobotFile:
    return load(written(folder, text))


def test_two_lines_are_enough(tmp_path):
    file = of(tmp_path, SHORT)
    driver = load_driver(file)
    spec = driver.spec()
    assert (spec.low, spec.high, spec.grippers) == (tuple(LOW), tuple(HIGH), GRIPPERS)
    np.testing.assert_array_equal(driver.q, HOME)
    checked(file, spec, driver.q)
    checked(file, spec, np.where(np.arange(J) == 1, LOW - 0.02, HOME))  # on a limit
    assert (file.host, file.port, file.rate, file.start) == ("127.0.0.1", 5600, None, "first_day")
    assert (file.keys, file.arms, file.reset, file.park, file.needs_go) == (None, None, (), None, True)
    np.testing.assert_array_equal(file.effort, spec.effort)
    assert not of(tmp_path, "needs_go = false\n" + DRIVER + "simulated = true").needs_go
    slow, fast = (file.profiles[name].limits for name in ("first_day", "evaluating"))
    np.testing.assert_allclose(slow.rates.velocity, 0.1 * fast.rates.velocity)
    for profile in file.profiles.values():
        assert (profile.limits.overspeed > profile.limits.rates.velocity).all()
        Gate(profile.limits, 0.005)


def test_a_whole_file(tmp_path):
    low = np.where(np.arange(J) % 7 == 0, -1, LOW).tolist()
    changes = {
        "port = 5600": "port = 7000",
        "# keys": "keys",
        'name = "fake"': 'name = "my_arm.py:MyArm"',
        "velocity = 2.5": f"low = {low}\nvelocity = 2",
        'like = "evaluating"': 'like = "evaluating"\nfollowing = 0.2',
    }
    text = LONG
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file = of(tmp_path, text)
    driver = load_driver(file)
    checked(file, driver.spec(), HOME)
    assert (type(driver).__name__, file.options, file.port, file.rate) == ("MyArm", {"lag": 0.02}, 7000, 200.0)
    assert file.keys == tmp_path / "keys"
    assert file.effort[[0, 6, 13]].tolist() == [9.0, np.inf, np.inf]
    poses = np.random.default_rng(0).uniform(LOW, HIGH, (20, J))
    np.testing.assert_allclose(file.arms(poses), viperx()(poses), atol=1e-3)  # lengths are rounded in the document
    careful, evaluating = file.profiles["careful"].limits, file.profiles["evaluating"].limits
    for found, numbers in ((evaluating.rates.velocity, 2.0), (careful.rates.velocity, 0.6), (careful.overspeed, 0.9),
                           (careful.rates.jerk, 0.3 * evaluating.rates.jerk), (careful.following, 0.2)):  # fmt: skip
        np.testing.assert_allclose(found, np.broadcast_to(numbers, J))
    assert (careful.low[0], careful.workspace.between_arms) == (-1, 0.05)
    first, *_, last = file.reset
    assert (first.gripper, first.grippers, first.set, first.every) == ("open", GRIPPERS, {"compliance": 0.5}, 1)
    assert (last.grippers, last.every, last.wait, last.speed) == ((13,), 5, True, 0.2)
    np.testing.assert_array_equal(last.joints, [*[np.nan] * 7, *HOME[7:]])
    np.testing.assert_array_equal(last.random, [0.0] * 7 + [0.1] * 6 + [0.0])


def test_the_documented_file_is_valid(tmp_path):
    file = of(tmp_path, LONG)
    checked(file, load_driver(file).spec(), HOME)
    Reset(HOME, file.reset, file.profiles["careful"].limits, episode=0, rng=np.random.default_rng(0), arms=file.arms)
    park(HOME, file.park, file.profiles["careful"].limits)


def test_a_digest_is_of_what_acts(tmp_path):
    def digest(text: str, name: str = "evaluating") -> str:
        return of(tmp_path, text).profiles[name].digest

    plain = digest(SHORT)
    assert digest(SHORT + "port = 7000\n[profile.first_day]\nvelocity = 0.1") == plain
    assert digest(SHORT + '[profile.mine]\nlike = "evaluating"', "mine") == plain
    for each in ("velocity = 0.9", "acceleration = 9", "jerk = 900", "following = 0.9", "first = 0.9", "high = 0.9",
                 "velocity = 0.5\noverspeed = 0.9", "grip_effort = 4"):  # fmt: skip
        assert digest(f"{SHORT}[profile.evaluating]\n{each}" + "\nlow = 0.0" * ("grip" not in each)) != plain
    longer = LONG.replace("tip = [0.15", "tip = [0.16")
    assert len({*map(digest, (LONG, longer, LONG.replace("radius = 0.03", "radius = 0.04")))}) == 3
    assert digest(LONG, "teleop") == digest(longer, "teleop")


DRIVER = 'name = "a"\n[driver]\nname = "fake"\n'
FRANKA = 'name = "a"\n[driver]\nname = "franka_http"\n'
V4L2 = SHORT + '[[camera]]\nname = "top"\ndriver = "v4l2"\ndevice = "/dev/video0"\n'
DEVICE = SHORT + '[[device]]\nname = "mine"\ndriver = "{}"\n'
STEP = SHORT + "[[reset.step]]\n"
MINE, WORKSPACE = 'name = "a"\ndriver = "my_arm.py:{}"', "profile.evaluating.workspace."
PROFILE = SHORT + "[profile.first_day]\n"
CHAIN = SHORT + "[[kinematics.arm]]\nbase = [0, 0, 0]\ntip = [0.1, 0, 0]\n"


def camera(old: str, new: str) -> str:
    assert old in CAMERAS + VIEW
    return SHORT + (CAMERAS + VIEW).replace(old, new)


BAD = [  # text, parameter, what else the error names
    (camera('name = "top"', 'name = "a top"'), "camera[0].name", "letters, digits"),
    (camera('name = "top"', 'name = "wrist"'), "camera[1].name", "none before it"),
    (camera("height = 60", "height = 60\nlatency = -0.1"), "camera[1].latency", "0 to 1"),
    (camera(":MyCamera", ":Large"), "camera[1].driver", "from 1 to 4096 pixels"),
    (camera(':MyCamera"\nheight = 60\nwidth = 80', ':Half"'), "camera[1].driver", "lacks the methods open, read"),
    (camera('of = "wrist"', 'of = "rist"'), "camera[2].of", "a camera before it that has a driver"),
    *((f"{SHORT}{CAMERAS}{VIEW}{key} = {value}", f"camera[2].{key}", named) for key, named, values in [
        ("crop", "within 80 x 60", ([50, 20, 40, 30], [0, 50, 2, 20], [-1, 0, 2, 2], [0, 0, 0, 2])),
        ("crop", "4 whole numbers", ([0, 0, 2.0, 2],)), ("rotate", "0, 90, 180 or 270", (45, "true")),
        ("flip", "horizontal or vertical", ('"both"',)), ("resize", "2 whole numbers", ([128],)),
        ("resize", "above 0", ([0, 128],)),
    ] for value in values),
    (SHORT + "port = 65533\n" + CAMERAS, "port", "for each camera"),
    ('driver = "fake"', "name", "missing"), ('name = 3\ndriver = "fake"', "name", "3"),
    *((SHORT + text, key, named) for text, key, named in [
        ("prot = 5600", "prot", "port"), ("port = true", "port", "True"), ("port = 80", "port", RANGES["port"].why),
        ("rate = nan", "rate", "nan"), ("rate = 600", "rate", RANGES["rate"].why), ("park = [0, 1]", "park", "[0, 1]"),
        ("effort = 1e9", "effort", RANGES["effort"].why), ("needs_go = false", "needs_go", "not simulated"),
        ('keys = "no_folder"', "keys", "no_folder"), ("[kinematics]\ntip = [0, 0, 1]", "kinematics.arm", "missing"),
    ]),
    *((PROFILE + text, f"profile.first_day.{key or text.split()[0]}", named) for text, key, named in [
        ("jerk = [1, 2, 3]", "", "[1, 2, 3]"), ("acceleration = inf", "", "inf"), ("low = 0.5\nhigh = 0.5", "", "0.5"),
        ("velocity = 2\noverspeed = 1.5", "overspeed", "1.5"), ("grip_seconds = 5", "grip_effort", "missing"),
        ("workspace = { low = [0, 0, 0], high = [1, 1, 1] }", "", "[kinematics]"),
        ("grip_effort = 1e9", "", RANGES["grip_effort"].why),
        ("grip_effort = 4\ngrip_seconds = 3600", "grip_seconds", RANGES["grip_seconds"].why),
        ("scale = 100", "", RANGES["scale"].why), ("acceleration = 700", "", "640 of joint 0"),
        ("acceleration = 0.1", "", "brake from 0.32 for 3.2"),
        ("velocity = 3\njerk = 1", "jerk", "brake from 3 for 3.46 s"),
        *((f"{key} = {value}", "", PROFILE_RANGES[key].why) for key, value in [
            ("velocity", 1e-4), ("acceleration", 1e9), ("jerk", 1e9), ("following", 100), ("following", 1e-6),
            ("first", 100), ("overspeed", 100)]),
    ]),
    (MINE.format("Bare") + "\n[profile.first_day]\ngrip_effort = 4", "profile.first_day.grip_effort", "4"),
    (PROFILE + 'like = "a"\n[profile.a]\nlike = "first_day"', "profile.a.like", "first_day"),
    *((LONG.replace(old, new), key, named) for old, new, key, named in [
        ("[-0.85, -0.1,", "[-0.85, 1.1,", WORKSPACE + "high", "[0.85, 1.1, 0.9]"),
        ("high = [0.85,", "high = [100,", WORKSPACE + "high", RANGES["workspace"].why),
        ("between_arms = 0.05", "between_arms = 5", WORKSPACE + "between_arms", RANGES["between_arms"].why),
        ("radius = 0.03", "radius = 0.9", WORKSPACE + "radius", RANGES["radius"].why),
        ("base = [0.469,", "base = [469,", "kinematics.arm[1].base", RANGES["kinematics"].why),
        ("offset = [0.2,", "offset = [200,", "kinematics.arm[0].links[3].offset", RANGES["links"].why),
        ("yaw = 3.1416", "yaw = 180", "kinematics.arm[1].yaw", RANGES["yaw"].why),
    ]),
    (CHAIN + "joints = [0]\nlinks = [{ offset = [0, 0, 0], axis = [0, 0, 2] }]", "kinematics.arm[0].links[0].axis",
     "[0, 0, 2]"),
    (STEP, "reset.step[0]", "empty"),
    *((STEP + text, f"reset.step[0].{text.split()[0]}", named) for text, named in [
        ("joints = [0, 1]", "[0, 1]"), ("lift = 0.1", "[kinematics]"), ("arm = 2\njoints = [0]", "2"),
        ("lift = 0.1\nrandom = 0.1", "no random in the same step"), ('gripper = "opened"', "opened"),
        ("height = 0.3", "Write `lift`"), ("relieve = true", "commanded by joints"), ("wait = -1", "-1"),
        ("random = 9", PROFILE_RANGES["random"].why),
        *((f"{key} = {value}", RANGES[key].why) for key, value in [
            ("speed", 0.001), ("wait", 6000), ("every", 20000), ("lift", 5)]),
    ]),
    (LONG + "\n[[reset.step]]\npose = [0, 0, 0.2, 0, 0, 0]", "reset.step[5].arm", "which arm"),
    (LONG + "\n[[reset.step]]\narm = 1\npose = [0, 0, 200, 0, 0, 0]", "reset.step[5].pose", RANGES["pose"].why),
    (POSES + "[kinematics]\ntip = [0, 0, 1]", "kinematics", "commanded by poses"),
    *((f"{POSES}[[reset.step]]\n{text}", f"reset.step[0].{key}", named) for text, key, named in [
        ("arm = 0\npose = [0.4, 0, 0.2, 0, 0, 0]", "pose", "Write `joints`"),
        ("relieve = true\nheight = 0.3", "relieve", "without height"), ("height = 50", "height", RANGES["height"].why),
    ]),
    *((MINE.format(name), "driver", named) for name, named in [
        ("Wrenches", "wrenches"), ("Weak", "limits of effort"), ("Posed", "Each has 6"), ("Mine", "class Mine"),
        ("Broken", "no such bus"), ("Half", "clear_faults"), ("Stuck", "velocities above 0"),
        ("Degrees", "are these degrees?"), ("Fast", "crosses its range within a pass"),
        ("Endless", "finite numbers"),
    ]),
    (MINE.format("Needs"), "driver.serial", "my_arm.py:Needs"), ('name = "a"\ndriver = "fakes"', "driver", "fake"),
    ('name = "a"\ndriver = "bad.py:MyArm"', "driver", "no_such_module"),
    *((DRIVER + text, key, named) for text, key, named in [
        ("lagg = 0.1", "driver.lagg", "0.1"), ("tick = 10", "driver", RANGES["tick"].why),
        ("rate = 5000", "driver", RANGES["rate"].why), ("rate = 60\ntick = 0.01", "driver", "a pass in each tick"),
        ("lag = 30", "driver.lag", RANGES["driver.lag"].why),
    ]),
    *((f"{FRANKA}{key} = {value}", f"driver.{key}", RANGES[f"driver.{key}"].why) for key, value in [
        ("timeout", 1000), ("gripper_lock", 1000), ("recoveries", 1000000)]),
    *((camera('"fake"', f'"fake"\n{key} = {value}'), f"camera[0].{key}", RANGES[f"camera.{key}"].why)
      for key, value in [("latency", 9), ("rate", 1e9)]),
    *((f"{V4L2}{key} = {value}", f"camera[0].{key}", RANGES[f"camera.{key}"].why) for key, value in [
        ("fps", 1e9), ("exposure", -5), ("white_balance", 5)]),
    *((DEVICE.format(name) + f"{key} = {value}", f"device[0].{key}", RANGES[f"device.{key}"].why)
      for name, key, value in [("gamepad", "dead_zone", 1), ("lerobot", "drive_torque", 2),
                               ("spacemouse", "silence", 60), ("gello", "baud", 5)]),
]  # fmt: skip


def test_an_arm_that_is_commanded_by_poses_moves_within_limits_of_poses(tmp_path):
    steps = "lift = 0.1", "arm = 1\nlift = -0.05", "arm = 1\njoints = [0.5, 0, 0.3, 3, 0, 0, 0.2]"
    file = of(tmp_path, POSES + "".join(f"[[reset.step]]\n{step}\n" for step in steps))
    driver = load_driver(file)
    checked(file, driver.spec(), driver.q)
    limits = file.profiles["evaluating"].limits
    np.testing.assert_allclose(limits.rates.velocity[:7], [0.5] * 3 + [1.5] * 3 + [10])
    ways = [way for _, way in Reset(driver.q, file.reset, limits, episode=0, rng=np.random.default_rng(0))._todo]
    np.testing.assert_allclose([way[-1][[2, 9]] for way in ways], [[0.3, 0.3], [0.3, 0.25], [0.3, 0.3]])
    np.testing.assert_allclose(ways[-1][-1][7:], [0.5, 0, 0.3, 3, 0, 0, 0.2])
    high, still = of(tmp_path, POSES + "[[reset.step]]\narm = 1\nheight = 0.35\n[[reset.step]]\nwait = 0.5").reset
    np.testing.assert_array_equal(high.least, np.where(np.arange(14) == 9, 0.35, -np.inf))
    assert (high.wait, high.stands, still.wait, still.stands, still.least) == (False, 0.0, False, 0.5, None)
    up = of(tmp_path, POSES + "[[reset.step]]\nlift = 0.5").reset
    with pytest.raises(ConfigError, match=naming("reset.step[0]", "0.7")):
        Reset(driver.q, up, limits, episode=0, rng=np.random.default_rng(0))


def test_a_reset_is_solved_from_the_set_point_where_it_begins(tmp_path):
    steps = "gripper = 'open'", f"joints = {HOME.tolist()}\nevery = 5", "lift = 0.08\nevery = 2"
    file = of(tmp_path, LONG.partition("[[reset.step]]")[0] + "".join(f"[[reset.step]]\n{step}\n" for step in steps))
    driver = load_driver(file)
    start = HOME + 0.1 * (np.arange(J) == 1)
    make, limits = Motions(file, driver), file.profiles["evaluating"].limits
    motion = make("reset", {"seed": 3, "episode": 2}, start, limits)
    (_, opened), (_, lifted) = motion._todo
    tips = file.arms(np.stack([opened[-1], lifted[-1]]))[:, :, -1]
    np.testing.assert_allclose(tips[:, 1] - tips[:, 0], [[0, 0, 0.08]] * 2, atol=1e-4)
    np.testing.assert_array_equal(opened[0], start)
    assert [len(make("reset", {"episode": k}, start, limits)._todo) for k in (1, 2, 5)] == [1, 2, 2]


@pytest.mark.parametrize(
    ("key", "alone", "asked"),
    [("new_object = true", [], [1, 2]), ("every = 2", [2], [2]), ("every = 2\nnew_object = true", [2], [1, 2])],
)
def test_a_step_for_a_new_object_is_taken_on_request(tmp_path, key, alone, asked):
    file = of(tmp_path, SHORT + f"\n[[reset.step]]\ngripper = 'open'\n{key}")
    driver = load_driver(file)
    make, limits = Motions(file, driver), file.profiles["evaluating"].limits
    for more, taken in (({}, alone), ({"new_object": True}, asked)):
        due = [k for k in (1, 2) if make("reset", {"seed": 3, "episode": k, **more}, HOME, limits)._todo]
        assert due == taken


@pytest.mark.parametrize(("text", "parameter", "named"), BAD)
def test_a_bad_file_is_refused_with_its_key_and_value(tmp_path, text, parameter, named):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=naming(parameter, named, path)) as e:
        load(path)
    assert e.value.parameter == parameter
    assert {each.why for each in (*RANGES.values(), *PROFILE_RANGES.values())} <= {named for _, _, named in BAD}


def test_a_file_that_cannot_be_read_is_named_and_the_command_line_replaces_its_driver(tmp_path):
    assert load(written(tmp_path, 'name = "cell"\n'), driver="fake").driver == "fake"
    assert load(written(tmp_path, SHORT), driver="my_arm.py:MyArm").driver == "my_arm.py:MyArm"
    for path in (tmp_path / "none.toml", written(tmp_path, "name = ")):
        with pytest.raises(ConfigError, match=naming(path)):
            load(path)
    (tmp_path / "robot.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(ConfigError, match=naming(tmp_path / "robot.toml")):
        load(tmp_path / "robot.toml")


NARROW = "[profile.{}]\nlow = [-3, {}, -1.7, -3, -1.8, -3, 0, -3, -1.8, -1.7, -3, -1.8, -3, 0]\n"
AT_HOME = f"[[reset.step]]\njoints = {HOME.tolist()}\n"


@pytest.mark.parametrize(
    ("text", "q", "parameter", "named"),
    [
        (SHORT + 'start = "first_dya"', HOME, "start", "first_day"),
        (SHORT + "rate = 300", HOME, "rate", "300"),
        (PROFILE + "velocity = 4", HOME, "profile.first_day.velocity", "4"),
        (PROFILE + "high = 4", HOME, "profile.first_day.high", "4"),
        (PROFILE + "low = -4", None, "profile.first_day.low", "-4"),
        (SHORT, HOME + 0.6 * (np.arange(J) == 2), "profile.first_day", "1.760"),
        (SHORT, np.where(np.arange(J) == 9, np.nan, HOME), "profile.first_day", "nan"),
        # A park pose and places of resets, in every profile.
        (f"park = {[0, -1.8, 1.5, 0, 0.5, 0, 0] * 2}\n" + SHORT + NARROW.format("teleop", "-1.5"), None,
         "profile.teleop",
         "park: joint 1 would go to -1.8, expected a place within this profile's -1.5 to 1.26: `end` could not"),
        (SHORT + NARROW.format("teleop", "-0.9") + AT_HOME, None, "profile.teleop", "reset.step[0]: joint 1"),
        (SHORT + NARROW.format("mine", "-1.05") + AT_HOME + "random = 0.1", None, "profile.mine",
         "-1.06 to -0.86"),
        (STEP + "arm = 1\njoints = [0, 0, 0, 0, 0, 0, 0]\n[[reset.step]]\nnew_object = true\narm = 1\n"
         "add = [0, 9, 0, 0, 0, 0, 0]", None, "profile.first_day", "reset.step[1]: joint 8 would go to 9"),
        (POSES + "[[reset.step]]\nheight = 0.7", None, "profile.first_day",
         "reset.step[0]: joint 2 would go to 0.7"),
        (LONG + "\n" + AT_HOME + "[[reset.step]]\nlift = 1", None, "profile.first_day",
         "reset.step[6]: the tip of arm 0 cannot go 1 m"),
        (LONG.replace("-0.85, -0.1,", "-0.8, -0.1,"), None, "profile.evaluating", "park: the arms would leave"),
    ],
)  # fmt: skip
def test_what_the_robot_cannot_is_refused_before_it_moves(tmp_path, text, q, parameter, named):
    file = of(tmp_path, text)
    with pytest.raises(ConfigError, match=naming(parameter, named)) as e:
        checked(file, load_driver(file).spec(), q)
    assert e.value.parameter == parameter


def test_a_file_of_two_arms_is_none_of_one(tmp_path):
    with pytest.raises(ConfigError, match=naming("profile.first_day", "14")):
        checked(of(tmp_path, SHORT), viperx_arms(arms=1).spec(), None)


# Views of a camera's pictures.

PICTURE = CameraSpec(6, 8)
IMAGE = np.random.default_rng(0).integers(0, 256, (6, 8, 3)).astype(np.uint8)


def by_area(image, size, axis):
    """Means over equal parts of an axis, from a matrix of the share of each pixel in each part."""
    length = image.shape[axis]
    edges = np.arange(size + 1) * length / size
    low, high = np.maximum(edges[:-1, None], np.arange(length)), np.minimum(edges[1:, None], np.arange(length) + 1)
    return np.moveaxis(np.tensordot(np.maximum(high - low, 0) * size / length, image, (1, axis)), 0, axis)


@given(
    st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(1, 3), st.integers(1, 2)),
    st.sampled_from(TURNS),
    st.sampled_from(("", *FLIPS)),
)
def test_each_pixel_is_where_crop_rotation_and_flip_lead_it(crop, rotate, flip):
    view = View(crop, rotate, flip)
    x, y, width, height = crop
    shown = view.apply(IMAGE)
    size = view.size(PICTURE)
    assert shown.shape == (size.height, size.width, 3)
    assert shown.flags.c_contiguous
    for i in range(height):
        for j in range(width):
            turned = {0: (i, j), 90: (j, height - 1 - i), 180: (height - 1 - i, width - 1 - j), 270: (width - 1 - j, i)}
            row, column = turned[rotate]
            if flip:
                across = flip == "horizontal"
                row, column = (row, size.width - 1 - column) if across else (size.height - 1 - row, column)
            assert np.array_equal(shown[row, column], IMAGE[y + i, x + j])


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 20), st.integers(1, 20))
def test_a_resized_pixel_is_the_mean_of_its_area(height, width, rows, columns):
    image = np.random.default_rng(height * 20 + width).integers(0, 256, (height, width, 3)).astype(np.uint8)
    shown = View(resize=(rows, columns)).apply(image).astype(float)
    exact = by_area(by_area(image.astype(float), rows, 0), columns, 1)
    assert np.abs(shown - exact).max() < 0.5 + 1e-3
