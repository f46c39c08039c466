"""Requests of an operator from a terminal: what is shown before the robot may move, and where no reply comes.

What lets something move is requested with the generation of the state that was shown, and after Enter was pressed. A
script gives that generation itself, but for `go`, which only a key press sends.
"""

from __future__ import annotations

import signal
import sys
from time import monotonic
from typing import Any, Dict, List, Optional

from serl_chunk_robot.client.client import UNCONFIRMED, RobotClient, RobotError
from serl_chunk_robot.errors import ConfigError

MOVING = {  # command -> what Enter does
    "clear": "clear it: it is HELD then, and moves only after `go`",
    "go": "let that actor move it",
    "proceed": "let its motion go on",
    "park": "park it",
    "jog": "move that joint",
    "measure": "swing that joint",
    "profile": "choose these limits",
    "reboot": "reboot that motor",
    "torque-off": "switch its torque off",
    "end": "park it, and then switch its torque off",
}
SILENT = 2.0  # s without a state, after which nothing is known of a motion


def at_terminal() -> bool:
    """Return whether a person can be asked: input and output are a terminal's."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def ask_enter(question: str) -> None:
    """Wait for Enter. Raises RobotError where the input ends instead."""
    print(f"{question} [Enter; Ctrl-C leaves it as it is] ", end="", flush=True)
    if not sys.stdin.readline():
        raise RobotError("nothing was requested: the input ended before Enter")


def agreed(client: RobotClient, command: str, generation: Optional[int] = None) -> Dict[str, Any]:
    """Show the robot's state to the operator, and return it once he agrees that `command` is carried out in it.

    `generation`: that an earlier state was printed with, for scripts; None: ask at the terminal. Raises ConfigError:
    there is no terminal, and no generation; RobotError: no state came.
    """
    if command == "go" and not at_terminal():
        raise ConfigError("go: only a key press at a terminal lets an actor move the robot (the input is none)")
    name = client.hello()["robot"]
    state = client.next_state()
    if command == "go" and not state["controller"]:
        raise RobotError("no actor holds the lease, so that there is none to let go on. Start the actor first")
    if generation is not None:
        return {**state, "generation": generation}
    if not at_terminal():
        raise ConfigError(f"{command}: at no terminal it needs the generation that `status` printed with the state "
                          "which you looked at", parameter="--generation")  # fmt: skip
    print(shown(name, state))
    if command == "go":
        print(f"{state['controller']} (process {state['process']}) moves it after go")
    ask_enter(f"Look at the cell. Enter: {MOVING[command]}.")
    return state


def shown(name: str, state: Dict[str, Any]) -> str:
    """Return a line of what the robot does, who brought that about, and since when."""
    seconds = max(state["moment"] - state["since"], 0.0)
    ago = f"for {seconds:.0f} s" if seconds < 120 else f"for {seconds / 60:.0f} min"
    held = f", held by {state['held']['by']}" if state["held"] else ""
    return f"{name}  {state['state']}{held}: {state['word']} ({ago}, generation {state['generation']})"


def send_moving(client: RobotClient, command: str, arguments: Dict[str, Any], generation: Optional[int] = None) -> str:
    """Send a command that lets something move, once its operator agrees; returns what to print. See `agreed`."""
    state = agreed(client, command, generation)
    if command == "go":
        arguments = {"controller": state["controller"], "process": state["process"]}
    reply = client.request(command.replace("-", "_"), generation=state["generation"], **arguments)
    after = client.next_state()
    if after["held"] and after["generation"] == reply["generation"]:
        return f"{state['robot']}: held by {after['held']['by']}. Run `serl-chunk robot go`."
    return f"{reply['state']}: {reply['word']}"


def send_calming(client: RobotClient, command: str) -> str:
    """Send a stop or hold; returns what to print. Raises RobotError, which says that the robot did not confirm."""
    try:
        reply = client.request(command)
    except RobotError as e:
        raise RobotError(f"{UNCONFIRMED} ({e})") from e
    return f"{reply['state']}: {reply['word']}"


def end_day(client: RobotClient, generation: Optional[int] = None) -> str:
    """Let the server park the robot and then switch its torque off; returns what to print.

    Ctrl-C holds the robot, and torque stays on. Raises RobotError with the robot's state where it was not ended.
    """
    shown_state = agreed(client, "end", generation)
    pressed: List[int] = []
    # An exception of a signal could be lost in a library's code, and the robot would be taken for parked.
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        return _ended(client, client.request("end", generation=shown_state["generation"]), pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _ended(client: RobotClient, state: Dict[str, Any], pressed: List[int]) -> str:
    motion, heard = state["motion"], monotonic()
    try:
        while state["state"] == "MOVE":
            if pressed:
                state = client.request("hold")
                raise RobotError("Ctrl-C: the robot is held, and torque stays on")
            state = client.next_state(SILENT)
            heard, last = monotonic(), heard
            if heard - last > 2 * SILENT:  # this process stood still, and does not know what happened meanwhile
                raise RobotError(f"no state was read for {heard - last:.0f} s")
        if (state["state"], state["done"]) != ("STOPPED", motion) or not state["word"].startswith("torque off"):
            raise RobotError("the robot was not ended")
    except RobotError as e:
        raise RobotError(
            f"{e}: it was last in {state['state']} ({state['word']}). Look at the cell, clear the robot "
            "if it is STOPPED, and run `end` again."
        ) from e
    return f"{state['state']}: {state['word']}"


def history(client: RobotClient) -> List[str]:
    """Return a line for each of the newest requests that held, stopped, cleared or let go, the newest last."""
    entries = client.request("history")["history"]
    return [
        f"{entry['time']}  {entry['op']:5}  {entry['by']} at {entry['address']}, generation {entry['generation']}"
        for entry in entries
    ] or ["nothing is known of before"]
