"""What of an experiment's robot is there on this machine. Opens no robot and no camera."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from serl_chunk.commands.checks import Check
from serl_chunk.config.experiment import ExperimentConfig
from serl_chunk.config.robots import GymConfig
from serl_chunk.types import RobotSpec

CHECK_S = 3.0  # seconds that a robot's own check may take
_MAKERS = ("046D:C6", "256F:")  # of 3Dconnexion devices, in HID_ID's vendor and product
_SPACEMOUSE = "SpaceMouse"


def check_devices(config: ExperimentConfig, spec: RobotSpec, root: Path = Path("/")) -> Iterator[Check]:
    """The robot's own check, cameras and a SpaceMouse. `root`: of the file system; for tests."""
    if config.robot.real:
        own = config.robot.check_devices if isinstance(config.robot, GymConfig) else None
        yield _robot(own)
        if config.agent.image_keys and own is None:
            yield _cameras(config, root)
    else:
        cameras = f", its cameras {', '.join(config.agent.image_keys)} too" if config.agent.image_keys else ""
        yield Check("devices", "ok", f"none needed: robot {spec.name!r} is simulated{cameras}")
    mouse = _spacemouse(root)
    if mouse is not None:
        yield mouse


def _robot(own: Callable[[], Sequence[str]] | None) -> Check:
    if own is None:
        return Check(
            "devices", "ok", "none needed: the experiment brings no check (GymConfig(check_devices=...)), and a robot "
            "is not moved to find out"
        )  # fmt: skip
    found: list[Sequence[str] | Exception] = []

    def ask() -> None:
        try:
            found.append([str(problem) for problem in own()])
        except Exception as e:  # whatever a driver raises is what there is to say
            found.append(e)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(CHECK_S)
    remedy = "robot.check_devices of the experiment says so: see there"
    if not found:
        return Check("devices", "FAIL", f"the robot's own check did not end in {CHECK_S:g} s", remedy)
    if isinstance(found[0], Exception):
        return Check("devices", "FAIL", f"the robot's own check raised {type(found[0]).__name__}: {found[0]}", remedy)
    if found[0]:
        return Check("devices", "FAIL", "; ".join(found[0]), remedy)
    return Check("devices", "ok", "the robot's own check finds everything")


def _cameras(config: ExperimentConfig, root: Path) -> Check:
    names = ", ".join(config.agent.image_keys)
    here = sorted(str(p.relative_to(root)) for p in (root / "dev").glob("video*"))
    if here:
        return Check("cameras", "ok", f"the experiment uses {names}; here are {', '.join(here)}")
    return Check(
        "cameras", "warning", f"the experiment uses {names}; this machine shows no video device",
        "plug them in (ls /dev/video*); cameras on a network do not show here, and are fine",
    )  # fmt: skip


def _spacemouse(root: Path) -> Check | None:
    """A SpaceMouse that is plugged in; None where there is none."""
    nodes = []
    for folder in sorted((root / "sys/class/hidraw").glob("hidraw*")):
        try:
            fields = dict(
                line.split("=", 1) for line in (folder / "device/uevent").read_text().splitlines() if "=" in line
            )
        except (OSError, UnicodeDecodeError):
            continue
        _, vendor, product = [*fields.get("HID_ID", "").split(":"), "", "", ""][:3]
        if f"{vendor[-4:]}:{product[-4:]}".startswith(_MAKERS):
            nodes.append((root / "dev" / folder.name, fields.get("HID_NAME", "3Dconnexion device")))
    if not nodes:
        return None
    node, name = nodes[0]
    if not os.access(node, os.R_OK | os.W_OK):
        return Check(
            _SPACEMOUSE, "warning", f"{name} is plugged in, and this user may not open {node}",
            "a udev rule for vendor 256f (3Dconnexion) with MODE=\"0666\" or a group of yours, then plug it in again",
        )  # fmt: skip
    try:
        import pyspacemouse

        known = pyspacemouse.get_connected_devices()
    except Exception as e:  # no HID library, or none that it can load
        return Check(
            _SPACEMOUSE, "warning", f"{name} is plugged in; pyspacemouse cannot list it: {e}",
            "install the HID library (libhidapi-hidraw0 on Debian and Ubuntu)",
        )  # fmt: skip
    if known:
        return Check(_SPACEMOUSE, "ok", f"{', '.join(known)} at {node}")
    return Check(
        _SPACEMOUSE, "warning", f"{name} is plugged in and pyspacemouse does not know it",
        "a newer pyspacemouse may; or add it to its devices.toml",
    )  # fmt: skip
