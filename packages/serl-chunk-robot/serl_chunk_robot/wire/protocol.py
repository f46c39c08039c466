"""The messages between a robot's server and its clients, on one page.

Port P takes requests (a ROUTER; clients are DEALER or REQ), P + 1 publishes the state (a PUB), P + 2 + k the frames of
camera k, and with C cameras P + 2 + C + k the readings of input device k (PUBs of processes of their own). Every
message is one msgpack map whose arrays have msgpack-numpy's layout (`wire.arrays`).

A request is {"op": str, "id": int, ...}. It may hold "stamp", the newest "moment" that the client got from the server,
and "held", the seconds since then by the client's own clock. Their sum tells the server how old the message is, the
round trip included, without a clock in common: a request older than 2 s is refused, but for those that only stop.

    hello       name, role ("any", "controller" takes the lease, "operator"), process (text of one process of the
                client, to which with the name its lease belongs), protocol (2)
    lease drop  take and end the lease of the controller
    take        ends the controller's lease. For the operator
    command     target (J numbers), number (rising from each arm on), generation, stamp, held
    stop        name, if there was no hello: any client may stop, at any time
    hold release
    clear arm torque_off
    go          controller and process of the lease that the operator was shown: it may move the robot from then on
    reset park jog    and the arguments of the motion; a jog with "swing" moves the joint to and fro by the angle
    end         parks, and once the arms are measured there switches torque off. For the operator
    drive       number (another one for each drive), first (device -> the first joint that it leads): drives leaders to
                the joints of a robot that stands in HOLD, for 0.3 s after each request; first empty: ends it. For the
                one that has the lease; each other request that calms or moves the robot ends it too
    profile     name
    reboot      name of a motor, as the robot's driver has it; arm_is_supported, if the arm falls without that motor.
                For the operator of a STOPPED robot
    proceed     ends a motion's wait for the operator
    history     the newest entries of who held, stopped, cleared and said go
    ping        nothing: the lease ends after 2 s of silence outside RUN

What lets something move has to hold the generation of the robot as it is, or it is refused: clear, go, proceed, arm,
reset, drive, park, jog, end, torque_off, reboot, profile. The generation is that of the state which was shown to the
operator at the key press, or which the program read last. Each transition raises it, but for those at the end of a
motion and of braking and a release of a robot that stands.

A reply is {"id", "ok", "error" (a sentence, empty if ok), "generation", "state", "word", "moment", "run", "greet"}, for
hello with {"robot", "profiles", "spec", "cameras" (name, height, width, port of each), "views" (camera -> x, y, width,
height, rotate, flip, of its table), "devices" (name, port, first arm of each, -1: the next one)}, for a motion with
{"draws", "motion" (its number)}.
"run" names the server's process; "greet" is true for a connection that has to send hello first. A command without "id"
has no reply: the state's "number" is that of the newest one taken, and "counts" has the rejected ones by reason.

The state is published after every pass of the loop:

    run robot pass moment   the server's process, the robot's name, passes so far, the server's clock (s)
    state word generation profile digest    as in the replies
    since        when the state was entered, on the server's clock (s)
    controller process    who holds the lease, "" for none
    held         in HELD: {"by", "since"}, the client's name and the server's clock (s); else none
    motion done  numbers of the newest motion, and of the newest one that went as planned
    q dq effort stamp extra    what was measured last and believed; none before
    torque       whether the arms had torque then; none before
    set_point    what was commanded; none if unknown
    causes       of a stop that the last pass found: event -> detail. They last, or the robot could be cleared
    number factor reason counts    of the newest command taken, and what the gate did
    came         number of the newest command that came, and when (s on the server's clock); none before the first
    events       the last 64: [index, reward, success, failure]
    waiting      whether a motion waits for the operator
    answered     whether the driver answered every stop
    late         of the last 1000 passes: {"p50", "p99", "max"} seconds after the deadline

A frame is published as the camera gives it:

    run camera   the server's process that the camera's belongs to, the camera's name
    number       rises with each picture of the camera
    moment       when it was taken, on the server's clock (s): both processes are on one machine
    changed      the "moment" of the newest picture that differed from the one before it, from which a picture is as old
                 as it shows; of a camera without noise that of each picture
    image        uint8[H, W, 3], RGB

A reading of an input device is published 125 times a second (`devices.base`):

    run device   the server's process that the device's belongs to, the device's name
    number       rises with each message
    moment       when it was sent, on the server's clock (s)
    stamp        of the reading, on the same clock
    alive        whether the device is there
    twist        float64[6] in [-1, 1], or none
    joints       float64[J] of a leader, or none
    buttons      those that are pressed now
    began        when its process began, on the server's clock (s)
    keys         number, name, whether it went down, and moment on the server's clock (s) of each key event of the last
                 2 s, oldest first: each is in many readings, so that a reading that is lost loses none. Numbers are
                 those of a process
    pedals       names of the events, of a device that is a pedal; else none
    drive        of a leader that can be driven: [number, phase, why it failed] of the newest drive (`devices.base`);
                 none of other devices
"""

from __future__ import annotations

from typing import Tuple

from serl_chunk_robot.errors import ConfigError

PROTOCOL = 2
DEFAULT_PORT = 5600
STATE_PORT, FRAMES_PORT = 1, 2  # after that of requests
MAX_REQUEST = 8192  # bytes; a command of 100 joints has 1000
MAX_FRAME = 65536  # bytes; a client that sends more is disconnected
MAX_STATE = 1 << 20  # bytes
MAX_SIDE = 4096  # pixels of a picture's height and width
MAX_PICTURE = 3 * MAX_SIDE**2 + 4096  # bytes of a frame's message


def address(text: str) -> Tuple[str, int]:
    """Return host and port of "HOST[:PORT]", an IPv6 address in brackets. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    if host[:1] == "[" and host[-1:] == "]":
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{text!r}: write an IPv6 address in brackets, as in [::1]:{DEFAULT_PORT}.")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536 - FRAMES_PORT):
        raise ConfigError(f"{text!r} is no robot's address. Give HOST or HOST:PORT, as in 127.0.0.1:{DEFAULT_PORT}.")
    return host, int(port)
