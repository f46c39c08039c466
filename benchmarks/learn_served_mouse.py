"""The fake ALOHA task trained in real time by a simulated operator: server, two SpaceMice and console.

    python benchmarks/learn_served_mouse.py --out runs/benchmark_served_mouse --json learn_served_mouse.json

Scripted demonstrations are recorded through the server. Then a learner, the robot's server and an actor train,
each in a process of its own. The actor runs on a pseudo terminal with two SpaceMice, which are virtual below
pyspacemouse. The operator (`support/mouse_operator.py`) moves them and types Enter, c and space. The last checkpoint is
evaluated on 100 held-out starts without it, behind the server in real time and in lockstep (`served_policy.py`).

Counted are the steps that the actor recorded and those in the learner's journal, and the operator's interventions and
the journal's segments of human ticks. An intervention that began after the end of an episode, which the operator sees
0.2 s later, has no segment. Near a tick after which the robot did not follow, as on a busy machine, an intervention may
have none or several: devices count again once they were neutral.

Successes without help of each 40 training episodes are counted beside the clone's, under the same exploration.
Criteria: 85 % of the held-out starts; each other intervention is one segment; no step is lost or twice in the journal.
Training takes about 15 minutes on a quiet machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from going_online import WINDOW, explored, windows
from learn_served import HERE, evaluated, record
from support import learning
from support.cli_args import split, write_figures
from support.mouse_operator import SPEED, SimulatedOperator
from support.ports import free_port
from support.served import ROBOTS, ServedRobotProcess, end_with_parent

from serl_chunk.config.loader import load_experiment
from serl_chunk.config.overrides import apply_overrides
from serl_chunk.replay.episode import human_segments
from serl_chunk.runs.episodes import RunSource

TESTS = HERE.parent / "tests" / "support"
sys.path.append(str(TESTS))
from ptys import Pty  # noqa: E402

HOLD = 0.2  # s: `device.hold_s`
NEAR = 0.05  # s between the operator's first push and the tick that reads it, which may be the last of its episode
STOOD = 1.0  # s around a tick after which the robot did not follow: a device counts again once it was neutral
YIELDS = 10  # niceness of the learner: a robot PC has processors of its own
COLUMNS, ROWS = 100, 16
TRAINS = ("actor.clock=realtime", "actor.intervention=spacemouse")
# Hands of a human are slower than the script.
LEARNS = (
    "learner.max_steps=3000",
    "robot.max_episode_steps=250",
    "agent.bc_joint_noise=0.8",  # about 0.05 rad, of which the recorded figures are
)


@contextlib.contextmanager
def process(arguments: list[str], out: Any, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process of its own session, which is ended at the end."""
    print("$", *arguments, flush=True)
    made = subprocess.Popen([sys.executable, *arguments], stdout=out, stderr=out, start_new_session=True, **more)
    try:
        yield made
    finally:
        if made.poll() is None:
            made.send_signal(signal.SIGTERM)
            try:
                made.wait(60)
            except subprocess.TimeoutExpired:
                made.kill()


def _learner() -> None:
    end_with_parent()
    os.nice(YIELDS)


def own_terminal() -> None:
    end_with_parent()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # its keys come from its own terminal


def train(out: Path, run: Path, demos: Path, seed: int, settings: list[str]) -> dict[str, Any]:
    """Train with the operator until the learner is done; returns what the operator did."""
    folder = out / "mice"
    folder.mkdir()
    port = free_port()
    mice = f"[{folder / 'hidraw0'},{folder / 'hidraw1'}]"
    device = [f"device.paths={mice}", f"device.translation={SPEED}", f"device.hold_s={HOLD}", "device.gripper=press"]
    shared = ["--exp_name", "fake_aloha", "--port", str(port), "--seed", str(seed)]
    shared += [f"--config.{text}" for text in (*TRAINS, *device, *settings)]
    learner = ["-m", "serl_chunk", "--learner", "--debug", "--demo_path", str(demos), "--checkpoint_path", str(run)]
    hands = [str(HERE / "support" / "mouse_actor.py"), str(folder), "2", "--actor", "--spool_path", str(out / "spool")]
    paths = {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]), "TERM": "xterm-256color"}
    screen = Pty(COLUMNS, ROWS)
    screen.look()
    with ServedRobotProcess(ROBOTS / "fake_aloha.toml", clears=False) as robot, (out / "learner.log").open("wb") as log:
        began = time.monotonic()
        address = f"--config.robot.server={robot.address}"
        with (
            process([*learner, *shared], log, preexec_fn=_learner) as training,
            process([*hands, *shared, address], screen.slave, stdin=screen.slave, env={**os.environ, **paths},
                    preexec_fn=own_terminal) as actor,
        ):  # fmt: skip
            while not (folder / "mouse.sock").exists():
                if actor.poll() is not None:
                    raise SystemExit("\n".join(screen.picture.shown()))
                time.sleep(0.1)
            operator = SimulatedOperator(robot.address, folder / "mouse.sock", screen.picture.shown, screen.type, seed)
            operator.run(lambda: actor.poll() is not None)
            codes = actor.wait(), training.wait(600)
        seconds = time.monotonic() - began
        server = robot.figures()
    (out / "terminal.txt").write_text("\n".join([*screen.picture.above, *screen.picture.shown()]))
    screen.close()
    if codes != (0, 0):
        raise SystemExit(f"the actor ended with {codes[0]} and the learner with {codes[1]}: see {out}/terminal.txt")
    done = {"seconds": seconds, "interventions": operator.interventions, "keys": operator.keys, **server}
    (out / "operator.json").write_text(json.dumps(done))
    return done


def steps(out: Path, source: RunSource) -> dict[str, int]:
    """Compare the steps of the actor with the journal's."""
    mine: Counter[tuple[str, int]] = Counter()
    for episode, ticks in json.loads((out / "mice" / "recorded.json").read_text()):
        mine.update((episode, tick) for tick in ticks)
    journal: Counter[tuple[str, int]] = Counter()
    for key in source.keys():
        rows = source.read(key).steps
        journal.update((rows.episode_id, rows.first_tick + k) for k in range(rows.n))
    return {
        "episodes": len({episode for episode, _ in mine}), "by_actor": mine.total(), "in_journal": journal.total(),
        "lost": (mine - journal).total(), "double": (journal - mine).total(),
    }  # fmt: skip


def segments(interventions: list[list[float]], source: RunSource) -> dict[str, int]:
    """Compare the operator's interventions with the journal's segments of human ticks, by their moments."""
    begin, end = np.array(interventions).reshape(-1, 2).T
    number, within, stood = np.zeros(len(begin), int), np.zeros(len(begin), bool), np.zeros(len(begin), bool)
    ticks = found = without = 0
    for key in source.keys():
        rows = source.read(key).steps
        within |= (rows.stamp[0] <= begin) & (begin <= rows.stamp[-1] - NEAR)
        for stall in rows.stamp[rows.lost_ticks > 0]:
            stood |= (begin - STOOD <= stall) & (stall <= end + STOOD)
        for first, last in human_segments(rows.source, rows.decision_tick):
            ticks, found = ticks + int(last - first), found + 1
            [own] = np.nonzero((begin - NEAR <= rows.stamp[first]) & (rows.stamp[first] <= end))
            number[own] += 1
            without += not len(own)
    return {
        "interventions": len(begin), "segments": found, "human_ticks": ticks,
        "one_segment": int((number == 1).sum()), "after_the_end": int(((number == 0) & ~within).sum()),
        "not_one_as_the_robot_stood": int((stood & within & (number != 1)).sum()),
        "no_segment": int(((number == 0) & within & ~stood).sum()),
        "several_segments": int(((number > 1) & ~stood).sum()), "segments_of_none": without,
    }  # fmt: skip


def main() -> None:
    p = learning.parser(__doc__, "benchmark_served_mouse", of="of the training", seed=42)
    p.add_argument("--demos", type=int, default=20, help="scripted demonstrations; with fewer the operator intervenes")
    args = learning.arguments(p)
    out = args.out.resolve() / f"seed_{args.seed}"
    run, demos, saved = out / "run", out / "demos", out / "operator.json"
    if not saved.exists():
        out.mkdir(parents=True)
        with ServedRobotProcess(ROBOTS / "fake_aloha.toml") as robot:
            record(robot, demos, args.demos)
        train(out, run, demos, args.seed, [*LEARNS, *args.set])
    done, source = json.loads(saved.read_text()), RunSource(run)
    result: dict[str, Any] = {
        "seed": args.seed, "demonstrations": args.demos, "seconds": done["seconds"], "steps": steps(out, source),
        "interventions": segments(done["interventions"], source), "keys": Counter(name for _, name in done["keys"]),
        "server": {name: value for name, value in done.items() if name not in ("interventions", "keys", "seconds")},
    }  # fmt: skip
    print(json.dumps(result, indent=2), flush=True)
    result |= evaluated(run, args.episodes, LEARNS[1:])
    clone = learning.Trained(apply_overrides(load_experiment("fake_aloha"), [split(text) for text in LEARNS[1:]]), run)
    result |= {f"successes_of_{WINDOW}_in_training": windows(run), "clone_explored_of_200": explored(clone, 200)}
    counts, steps_ = result["interventions"], result["steps"]
    result["holds"] = bool(
        result["served"]["success_rate"] >= 0.85 and not steps_["lost"] and not steps_["double"]
        and not counts["no_segment"] and not counts["several_segments"] and not counts["segments_of_none"]
    )  # fmt: skip
    print(json.dumps(result, indent=2))
    write_figures(args, result)


if __name__ == "__main__":
    main()
