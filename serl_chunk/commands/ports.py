"""Whether a learner's ports can be reached from here, in words, and the tunnel that may help."""

from __future__ import annotations

from collections.abc import Iterator

from serl_chunk.commands.checks import Check, duration
from serl_chunk.transport import sockets
from serl_chunk.transport.reach import Reach
from serl_chunk.transport.sockets import CHANNELS


def tunnel(ip: str, port: int) -> str:
    """The command that makes a learner's ports those of this machine."""
    there = "GPU_BOX" if sockets.is_loopback(ip) else ip
    return "ssh " + " ".join(f"-L {p}:127.0.0.1:{p}" for p in range(port, port + len(CHANNELS))) + f" {there}"


def check_ports(found: list[Reach], ip: str, port: int) -> Iterator[Check]:
    """One check for each port, and what to do where it cannot be reached."""
    last = port + len(CHANNELS) - 1
    through = f"\nor through SSH, and then with --ip 127.0.0.1:\n  {tunnel(ip, port)}"
    advice = {
        "no host": "give the learner's name or IP address with --ip",
        "refused": "start the learner (with --bind 0.0.0.0, where it is on another machine), or give its --port"
        + through,
        "silent": f"check --ip, that the machine is on, and that its firewall lets TCP {port} to {last} in" + through,
        "mute": "another program has this port, or a tunnel leads to a port where nothing listens: start the learner, "
        f"or give its --port{through}",
        "unreachable": f"check the network between the two machines, and --ip{through}",
    }
    explained: dict[str, int] = {}
    for r in found:
        name = f"port {r.port} ({r.channel})"
        if not r.trouble:
            yield Check(name, "ok", f"reached in {duration(r.seconds)}", figures={"connect_s": r.seconds})
            continue
        same = explained.setdefault(r.trouble, r.port)
        remedy = advice[r.trouble] if same == r.port else f"as for port {same}"
        yield Check(name, "FAIL", f"{ip}:{r.port}: {r.detail}", remedy)
