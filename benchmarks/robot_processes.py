"""What a served robot does when its processes are killed, stand still or lie: whole processes, in real time.

    python benchmarks/robot_processes.py [--times 50] [--cases NAME ...] [--seed 0] [--json FILE]

Each case begins at random moments in motion. The robot is served by `serl-chunk-robot serve`, and its driver appends
each set point to a file with the moment at which it got it; an actor of another process commands 50 times a second, or
requests resets; this process is the operator's. Cases:

    server_run, server_reset    SIGSTOP and SIGCONT of the loop's process, 0.2 to 2 s, each second time of its front too
    actor_kill, actor_stop      SIGKILL of the actor; SIGSTOP and SIGCONT. Braking counts from its last command
    actor_reset                 SIGKILL of an actor in a reset, which goes on until the lease ends
    terminal_run, _reset        hold, stop, clear and go while the controller requests all that moves, without a pause
    driver_hangs, driver_locks  a call that lasts 1 s, without and with the interpreter's lock
    driver_exits, driver_lies   SystemExit; wrong poses, and a torque that is an array
    front                       SIGKILL of the front

Set points that change after the robot stands, and before an operator's go, are counted; none may. "late" counts those
that were under way to the driver as the loop stood still, and arrived as it went on: at most one each time, of a pass.
A time at which the machine kept the loop from running for more than 100 ms is counted apart and repeated. The exit
status is 1 where a robot moved that must not, or ended in another state than it must. Times are figures: with a
validity of 80 ms, braking after an actor's last command within 95 ms (median) and 140 ms (largest).
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from support.cli_args import make_parser, write_figures
from support.process_cell import BEGINS, ENDS, STOP, ProcessCell
from support.robot_moments import MOST, P50, STOOD_STILL, VALIDITY

from serl_chunk_robot.client.client import RobotError

PASS = 1 / 200  # s, of the loop
STAYS = 0.3  # s for which a robot that must stand is watched
LEASE = 3.0  # s: longer than a silent actor's lease lasts
STANDING = ("HOLD", "HELD", "STOPPED")
MOVING = ("RUN", "MOVE")


class Trial(NamedTuple):
    """What became of the robot once. Times are in s, NaN where there is none."""

    braking: float  # until the driver got the first set point of a pass that braked
    noticed: float  # until STALLED was published
    travel: float  # rad until it stood, of the joint that went furthest
    changed: int  # set points that differ from the one at which it stood
    states: str  # after those of its motion, and before a go
    broken: tuple[str, ...]  # what must not be
    late: bool = False  # whether a set point of before was under way to the driver while the loop stood still


class Disturbed(Exception):
    """The machine kept the loop from running."""


def _path(states: list[dict[str, Any]]) -> str:
    """The states after motion, without repetitions."""
    names = [state["state"] for state in states]
    begins = next((k for k, name in enumerate(names) if name not in MOVING), len(names))
    return " ".join(name for k, name in enumerate(names) if k >= begins and name != names[k - 1]) or names[-1]


def _without_braking(path: str) -> str:
    """The states without braking, which may take less than a pass."""
    return path[len("BRAKE ") :] if path.startswith("BRAKE ") else path


def _check_undisturbed(states: list[dict[str, Any]]) -> None:
    if any(STOOD_STILL in state["word"] for state in states):
        raise Disturbed


def _standing(states: list[dict[str, Any]]) -> float:
    """The moment of the pass since which the robot stands; NaN where it does not."""
    last = next((k for k, s in reversed(list(enumerate(states))) if s["state"] not in STANDING), -1)
    return float(states[last + 1]["moment"]) if last + 1 < len(states) else np.nan


def _judged(
    cell: ProcessCell, event: float, states: list[dict[str, Any]], expected: tuple[str, ...], braked: float = np.nan
) -> Trial:
    """Judge an event after which the robot brakes, and stands until now.

    Args:
        expected: how `states` may go after braking.
        braked: moment of the first set point of braking, where the published states do not tell.
    """
    _check_undisturbed(states)
    after = [s for s in states if s["moment"] > event]
    stands, path = _standing(after), _path(states)
    moments, targets = cell.set_points()
    broken = (
        []
        if _without_braking(path) in expected
        else [f"{path}, expected {' or '.join(expected)}: {states[-1]['word']}"]
    )
    if np.isnan(stands):
        return Trial(braked - event, np.nan, np.nan, 0, path, (*broken, "it does not stand"))
    at, rest = (min(int(np.searchsorted(moments, m)), len(moments) - 1) for m in (event, stands))
    if np.isnan(braked):
        begins = next(s["moment"] for s in after if s["state"] not in MOVING)
        braked = float(moments[min(int(np.searchsorted(moments, begins)), len(moments) - 1)])
    changed = int((targets[rest:] != targets[rest]).any(axis=1).sum())
    if changed:
        broken.append(f"{changed} set points changed")
    travel = float(np.abs(targets[rest] - targets[max(at - 1, 0)]).max())
    return Trial(braked - event, np.nan, travel, changed, path, tuple(broken))


def _stood(cell: ProcessCell, woke: float, states: list[dict[str, Any]], broken: list[str]) -> Trial:
    """Judge a loop that stood still until `woke`: its set point may not change any more.

    A set point that was under way to the driver as the loop began to stand arrives late, and is the one at which the
    robot stands; it is of one pass.
    """
    moments, targets = cell.set_points()
    at = int(np.searchsorted(moments, woke)) - 1
    late = np.abs(targets[min(at + 1, len(targets) - 1)] - targets[at])
    changed = int((targets[at + 1 :] != targets[min(at + 1, len(targets) - 1)]).any(axis=1).sum())
    stalled = next((s["stalled"] for s in states if s["state"] == "STALLED"), np.nan)
    path = _path([s for s in states if s["state"] != "STALLED"])
    if changed:
        broken.append(f"{changed} set points changed")
    if (late > cell.limits.rates.velocity * PASS).any():
        broken.append(f"it went on by {late.max():.4f}")
    if path != "STOPPED":
        broken.append(f"{path}: {states[-1]['word']}")
    travel = float(np.abs(targets[at:] - targets[at]).max())
    return Trial(np.nan, float(stalled), travel, changed, path, tuple(broken), bool(late.any()))


def _server(cell: ProcessCell, rng: np.random.Generator, count: int, name: str) -> Trial:
    cell.in_motion(float(rng.uniform(0.1, 0.5)), name)
    stopped = [cell.server.pid, *([cell.front()] if count % 2 else [])]
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    states = cell.watch(lasts := float(rng.uniform(0.2, 2.0)))
    woke = time.monotonic()
    for process in stopped:
        os.kill(process, signal.SIGCONT)
    states += cell.collect(("STOPPED",)) + cell.watch(STAYS)
    silent = count % 2 == 0 and lasts > 0.5 and not any(s["state"] == "STALLED" for s in states)
    return _stood(cell, woke, states, ["STALLED was not published"] if silent else [])


def _actor(cell: ProcessCell, rng: np.random.Generator, count: int, how: str) -> Trial:
    """Kill or stop an actor that commands; then clear the robot, which another one would like to move."""
    begins, states = cell.interrupted(how, float(rng.uniform(0.2, 0.8)), LEASE)
    if how == "kill":
        cell.act_as("commands")
    _check_undisturbed(states)
    moment, path = cell.measured(how, begins, states), _path(states)
    broken = [] if _without_braking(path) in ("HOLD STOPPED", "STOPPED") else [f"{path}: {states[-1]['word']}"]
    if not moment.within:
        broken.append(f"it travelled {moment.travel:.4f} rad, {moment.bound:.4f} at most")
    cleared = time.monotonic()
    cell.press("clear")
    cell.watch(STAYS)
    if cell.state["state"] != "HELD":
        broken.append(f"{cell.state['state']} after clear: {cell.state['word']}")
    moments, targets = cell.set_points()
    held = targets[int(np.searchsorted(moments, cleared)) - 1 :]
    changed = moment.moved_after + int((held != held[0]).any(axis=1).sum())
    if changed:
        broken.append(f"{changed} set points changed")
    sent = cell.sent()
    taken = begins - moment.signalled  # the pass that took the last command
    braking = taken + moment.braking - float(sent[sent <= taken][-1])
    return Trial(braking, np.nan, moment.travel, changed, f"{path} HELD", tuple(broken))


def _actor_reset(cell: ProcessCell, rng: np.random.Generator, count: int) -> Trial:
    cell.in_motion(float(rng.uniform(0.1, 0.5)), "MOVE")
    event = time.monotonic()
    assert cell.actor is not None
    cell.actor.kill()
    cell.actor.wait()
    cell.act_as("resets")
    states = cell.collect(("HELD", "STOPPED"), 2 * LEASE) + cell.watch(2 * STAYS)
    made = _judged(cell, event, states, ("HELD", "HOLD HELD"))
    return made if made.states.startswith("BRAKE") else made._replace(braking=np.nan)  # the reset was done


def _terminal(cell: ProcessCell, rng: np.random.Generator, count: int, name: str) -> Trial:
    """Hold or stop; clear; perhaps hold again: nothing moves. Then go, and it does."""
    cell.in_motion(float(rng.uniform(0.05, 0.5)), name)
    op, event = ("hold", "stop")[count % 2], time.monotonic()
    cell.operator.request(op)
    states = cell.collect(("HELD", "STOPPED")) + cell.watch(STAYS)
    for more in ("hold", "stop", "clear")[int(rng.integers(3)) :]:
        if more != "clear":
            cell.operator.request(more)
        elif cell.state["state"] == "STOPPED":
            cell.press("clear")
        states += cell.watch(STAYS)
    if states[-1]["state"] == "STOPPED":
        cell.press("clear")
        states += cell.watch(STAYS)
    made = _judged(cell, event, states, ("HELD", "STOPPED HELD", "HELD STOPPED HELD"))
    cell.press("go")
    moved = any(state["state"] in MOVING for state in cell.collect(MOVING))
    return made if moved else made._replace(broken=(*made.broken, "go let nothing move"))


def _hang(cell: ProcessCell, rng: np.random.Generator, count: int, kind: str) -> Trial:
    """Let a call last; request a stop meanwhile, which no one confirms."""
    cell.in_motion(float(rng.uniform(0.1, 0.5)))
    asked, broken = time.monotonic(), []
    cell.fault(f"{('read', 'command')[count % 2]} {kind}")
    states = cell.collect(("STALLED",), 3.0)
    try:
        cell.operator.request("stop")
        answer = "it was confirmed"
    except RobotError as e:
        answer = str(e)
    answered = time.monotonic()
    states += cell.collect(("STOPPED",)) + cell.watch(STAYS)
    ended = cell.called(ENDS, asked)
    if not any(s["state"] == "STALLED" for s in states):
        broken.append("STALLED was not published")
    elif answered < ended and "DID NOT CONFIRM" not in answer:
        broken.append(f"a stop was answered: {answer}")
    return _stood(cell, ended, states, broken)


def _failure(cell: ProcessCell, rng: np.random.Generator, count: int, whats: tuple[str, ...]) -> Trial:
    cell.in_motion(float(rng.uniform(0.1, 0.5)))
    asked = time.monotonic()
    cell.fault(whats[count % len(whats)])
    states = cell.collect(("STOPPED",)) + cell.watch(STAYS)
    cell.fault()
    states += cell.watch(STAYS)
    began = cell.called(BEGINS, asked)
    begins = next((s["moment"] for s in states if s["moment"] > asked and s["state"] not in MOVING), np.nan)
    moments, _ = cell.set_points()
    braked = float(moments[min(int(np.searchsorted(moments, begins)), len(moments) - 1)])
    made = _judged(cell, began, states, ("STOPPED",), braked)
    ended = cell.server.poll()
    return made if ended is None else made._replace(broken=(*made.broken, f"the server ended: {ended}"))


def _front(cell: ProcessCell, rng: np.random.Generator, count: int) -> Trial:
    cell.in_motion(float(rng.uniform(0.1, 0.5)))
    before, event = cell.front(), time.monotonic()
    os.kill(before, signal.SIGKILL)
    states = cell.collect(("STOPPED",), 20.0) + cell.watch(STAYS)
    moments, _ = cell.set_points()
    braked = float(moments[int(np.searchsorted(moments, cell.called(STOP, event))) - 1])
    made, more = _judged(cell, event, states, ("STOPPED",), braked), []
    if not any(why in states[-1]["word"] for why in ("requests cannot be received", "lapses")):  # what came first
        more.append(states[-1]["word"])
    if cell.front() in (0, before):
        more.append("no other front was started")
    return made._replace(broken=(*made.broken, *more))


Case = Callable[[ProcessCell, np.random.Generator, int], Trial]


def _of(function: Callable[..., Trial], *more: Any) -> Case:
    return lambda cell, rng, count: function(cell, rng, count, *more)


CASES: dict[str, tuple[str, Case]] = {  # name -> kind of the actor, and what is done
    "server_run": ("commands", _of(_server, "RUN")),
    "server_reset": ("resets", _of(_server, "MOVE")),
    "actor_kill": ("commands", _of(_actor, "kill")),
    "actor_stop": ("commands", _of(_actor, "stop")),
    "actor_reset": ("resets", _actor_reset),
    "terminal_run": ("greedy_commands", _of(_terminal, "RUN")),
    "terminal_reset": ("greedy_resets", _of(_terminal, "MOVE")),
    "driver_hangs": ("commands", _of(_hang, "sleep")),
    "driver_locks": ("commands", _of(_hang, "lock")),
    "driver_exits": ("commands", _of(_failure, ("read exit", "command exit"))),
    "driver_lies": ("commands", _of(_failure, ("read place", "read torque"))),
    "front": ("commands", _front),
}


def measure(folder: Path, name: str, times: int, seed: int) -> dict[str, Any]:
    kind, run = CASES[name]
    rng, done, disturbed = np.random.default_rng(seed), [], 0
    folder.mkdir()
    with closing(ProcessCell(folder)) as cell:
        cell.act_as(kind)
        while len(done) < times and disturbed < 5 + times:
            try:
                done.append(run(cell, rng, len(done)))
            except Disturbed:
                disturbed += 1
                continue
            if done[-1].broken:
                print(f"{name} {len(done)}: {done[-1]}", flush=True)
    return figures(done, disturbed)


def figures(done: list[Trial], disturbed: int) -> dict[str, Any]:
    """Summarize what happened, times in ms."""
    made: dict[str, Any] = {"n": len(done), "disturbed": disturbed}
    for field in ("braking", "noticed"):
        values = 1e3 * np.array([getattr(trial, field) for trial in done])
        values = values[~np.isnan(values)]
        if len(values):
            made |= {f"{field}_p50_ms": float(np.median(values)), f"{field}_max_ms": float(values.max())}
    made["travel_max"] = max((trial.travel for trial in done), default=np.nan)
    made["changed"] = sum(trial.changed for trial in done)
    made["late"] = sum(trial.late for trial in done)
    made["states"] = dict(Counter(trial.states for trial in done))
    made["broken"] = [each for trial in done for each in trial.broken]
    return made


HEAD = """
| case | times | braking p50 / max, ms | STALLED p50 / max | travel, rad | changed | late | states | broken | repeated |
|---|---|---|---|---|---|---|---|---|---|
""".strip()


def row(name: str, made: dict[str, Any]) -> str:
    times = [
        f"{made[f'{field}_p50_ms']:.0f} / {made[f'{field}_max_ms']:.0f}" if f"{field}_p50_ms" in made else "-"
        for field in ("braking", "noticed")
    ]
    states = "; ".join(f"{path} {n}" for path, n in made["states"].items())
    return (
        f"| {name} | {made['n']} | {times[0]} | {times[1]} | {made['travel_max']:.4f} | {made['changed']} | "
        f"{made['late']} | "
        f"{states} | {len(made['broken'])} | {made['disturbed']} |"
    )


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    made: dict[str, Any] = {}
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory(prefix="robot_processes_") as folder:
        for name in args.cases:
            made[name] = measure(Path(folder) / name, name, args.times, args.seed)
            print(row(name, made[name]), flush=True)
    braking = [made[name] for name in ("actor_kill", "actor_stop") if made.get(name, {}).get("n")]
    made["braking_in_time"] = all(
        each["braking_p50_ms"] <= 1e3 * (VALIDITY + P50) and each["braking_max_ms"] <= 1e3 * (VALIDITY + MOST)
        for each in braking
    )
    write_figures(args, made)
    return int(any(made[name]["broken"] or made[name]["n"] < args.times for name in args.cases))


if __name__ == "__main__":
    sys.exit(main())
