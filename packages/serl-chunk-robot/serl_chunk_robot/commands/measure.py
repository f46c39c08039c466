"""`serl-chunk-robot measure`: how late a joint follows its commands, and how late cameras show its motion.

The server swings one joint within the profile's limits (`motions.Oscillation`). All times are of the server's clock.
"""

from __future__ import annotations

from time import monotonic, sleep
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from serl_chunk_robot.client.client import RobotClient, RobotError
from serl_chunk_robot.control.motions import LONGEST_SWING

LEAST, MOST, STEP = -0.05, 0.45, 0.001  # s: delays that are compared; a later one is taken for one half a swing off
SEEN = 0.5  # correlation of a picture's change with the joint's motion, below which a camera does not show it
PARTS = 4  # of a recording, whose delays differ by what the measurement is uncertain about
PIXELS = 160  # rows and columns of a picture that are compared, at most
FIRST = 5.0  # s for the first picture of each camera


class Delay(NamedTuple):
    """A measured delay."""

    seconds: float
    uncertainty: float  # s: twice the standard error of the parts of the recording
    correlation: float  # at that delay, up to 1


class Recording(NamedTuple):
    """What was published during a swing. Moments are of the server's clock, s."""

    moments: np.ndarray  # float64[N], of passes
    set_point: np.ndarray  # float64[N], of the joint
    stamps: np.ndarray  # float64[N], of what was measured
    q: np.ndarray  # float64[N]
    pictures: Dict[str, List[Tuple[float, float, float]]]  # moments of the one before and of it, and their difference
    ages: Dict[str, List[float]]  # s from a picture's stamp to its arrival here


def motion_lag(recording: Recording) -> Delay:
    """The delay from the set point to the measured joint."""
    moments, set_point, stamps, q = recording[:4]

    def pair(part: slice, delay: float) -> Tuple[np.ndarray, np.ndarray]:
        return q[part], np.interp(stamps[part] - delay, moments, set_point)

    return _delay(len(q), pair)


def camera_latency(recording: Recording, camera: str) -> Optional[Delay]:
    """The delay from the joint's motion to the stamps of the pictures that show it; None where they do not show it."""
    seen = np.array(recording.pictures[camera])
    if len(seen) < 10 * PARTS:
        return None
    last, now, change = seen.T

    def pair(part: slice, delay: float) -> Tuple[np.ndarray, np.ndarray]:
        q = [np.interp(t[part] - delay, recording.stamps, recording.q) for t in (last, now)]
        return change[part], np.abs(q[1] - q[0])

    found = _delay(len(seen), pair)
    return found if found.correlation > SEEN else None


def _delay(size: int, pair: Callable[[slice, float], Tuple[np.ndarray, np.ndarray]]) -> Delay:
    """The delay at which two signals correlate best. `pair`: gives a part of both at a delay."""
    delays = np.arange(LEAST, MOST + STEP / 2, STEP)

    def best(part: slice) -> Tuple[float, float]:
        found = np.array([_correlation(*pair(part, delay)) for delay in delays])
        at = int(np.argmax(found))
        if not 0 < at < len(found) - 1:
            return float(delays[at]), float(found[at])
        a, b, c = found[at - 1 : at + 2]
        bend = a - 2 * b + c
        return float(delays[at] + (0.5 * STEP * (a - c) / bend if bend < 0 else 0.0)), float(b)

    seconds, correlation = best(slice(None))
    parts = [best(slice(k * size // PARTS, (k + 1) * size // PARTS))[0] for k in range(PARTS)]
    return Delay(seconds, max(2 * float(np.std(parts, ddof=1)) / PARTS**0.5, STEP), correlation)


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size > 0 else 0.0


def record(client: RobotClient, joint: int, angle: float, cameras: Sequence[str], generation: int) -> Recording:
    """Let the server swing a joint, and record what it publishes.

    Args:
        client: an operator.
        angle: amplitude, rad or the joint's own unit.
        generation: of the state that the operator was shown.

    Raises RobotError: the robot does not stand, a camera gives no picture, or the swing was ended.
    """
    pictures: Dict[str, List[Tuple[float, float, float]]] = {name: [] for name in cameras}
    ages: Dict[str, List[float]] = {name: [] for name in cameras}
    last: Dict[str, Tuple[int, float, np.ndarray]] = {}

    def look() -> None:
        for name in cameras:
            picture = client.newest_picture(name)
            if picture is None or (name in last and picture.number == last[name][0]):
                continue
            rows, columns = (-(-size // PIXELS) for size in picture.image.shape[:2])
            small = picture.image[::rows, ::columns].astype(np.int16)
            ages[name].append(client.server_time() - picture.moment)
            if name in last and small.shape == last[name][2].shape:
                change = float(np.abs(small - last[name][2]).mean())
                pictures[name].append((last[name][1], picture.moment, change))
            last[name] = picture.number, picture.moment, small

    ends = monotonic() + FIRST
    while len(last) < len(cameras):
        look()
        sleep(0.01)
        if monotonic() > ends:
            missing = ", ".join(name for name in cameras if name not in last)
            raise RobotError(f"no picture of camera {missing} within {FIRST:g} s. See the log of the robot's server")
    for name in cameras:
        pictures[name].clear()
    rows: List[Tuple[float, float, float, float]] = []
    ends = monotonic() + 2 * LONGEST_SWING
    state = client.request("jog", joint=joint, angle=angle, swing=True, generation=generation)
    motion = state["motion"]
    try:
        while state["state"] == "MOVE" and monotonic() < ends:
            state = client.next_state()
            if state["set_point"] is not None and state["q"] is not None:
                rows.append((state["moment"], state["set_point"][joint], state["stamp"], state["q"][joint]))
            look()
    except BaseException:  # Ctrl-C among them
        client.request("hold")
        raise
    if state["done"] != motion:
        raise RobotError(f"the swing was ended: {state['word']}")
    moments, set_point, stamps, q = np.array(rows).T
    return Recording(moments, set_point, stamps, q, pictures, ages)


def report(recording: Recording) -> List[str]:
    """Lines with what was measured, and where to write it."""
    lag = motion_lag(recording)
    lines = [
        f"motion lag  {_shown(lag)} from a set point to the measured joint. A profile's `following` must be above its "
        f"velocity x {max(lag.seconds, 0):.3f} s; the option `lag` of the driver `fake` simulates it"
    ]
    for name, ages in recording.ages.items():
        latency = camera_latency(recording, name)
        if latency is None:
            lines.append(f"camera {name}  does not show the motion. Choose a joint or an angle that it shows")
            continue
        here = latency.seconds + float(np.median(ages))
        lines.append(
            f"camera {name}  {_shown(latency)} from the motion to a picture's stamp, {1e3 * here:.0f} ms to its "
            f"arrival here. Add to `latency` in the [[camera]] table of its device: {latency.seconds:.3f}"
        )
    return lines


def _shown(delay: Delay) -> str:
    return f"{1e3 * delay.seconds:.1f} ms +- {1e3 * delay.uncertainty:.1f} ms"
