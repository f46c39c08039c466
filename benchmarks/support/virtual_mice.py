"""Two virtual SpaceMice below pyspacemouse, and what reports how they are held: raw HID reports, 125 a second.

    python virtual_mice.py FOLDER ARGUMENTS

runs the command serl-chunk with the mice FOLDER/left and FOLDER/right. All of the product runs, and of pyspacemouse;
only hidapi is replaced (`tests/support/fake_hid.py`). The socket FOLDER/mice.sock takes reports and passes them on: for
each one a byte for the mouse (0 left, 1 right), a byte for its length, and the report.
"""

from __future__ import annotations

import socketserver
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FAKE_HID = Path(__file__).resolve().parents[2] / "tests" / "support"
sys.path.append(str(FAKE_HID))
import fake_hid  # noqa: E402

NAMES = ("left", "right")
SOCKET = "mice.sock"
FULL = 350  # raw number of a full deflection
REST = np.zeros(6)


class MouseReports:
    """Makes the raw reports of one mouse.

    A mouse with two buttons reports translation and rotation in turns, zeros once when it is let go, and then nothing.
    A button's report comes in addition, when it changes.
    """

    def __init__(self) -> None:
        self._mask, self._turn, self._zeros = 0, 0, 0

    def tick(self, deflection: np.ndarray, buttons: tuple[bool, bool]) -> Iterator[bytes]:
        """Yield the reports of 8 ms. Args: float[6] in [-1, 1], and what is pressed."""
        mask = buttons[0] + 2 * buttons[1]
        if mask != self._mask:
            self._mask = mask
            yield fake_hid.buttons(mask)
        self._zeros = 0 if deflection.any() else self._zeros + 1
        if self._zeros > 2:
            return
        # Raw: x right, y towards the user, z down. As the product reads it: x forward, y left, z up, and about these.
        x, y, z, roll, pitch, yaw = (round(-FULL * float(value)) for value in deflection)
        self._turn = 1 - self._turn
        yield fake_hid.translation(y, x, z) if self._turn else fake_hid.rotation(pitch, roll, yaw)


def frame(mouse: int, report: bytes) -> bytes:
    return bytes((mouse, len(report))) + report


def frames(mice: Sequence[MouseReports], hands: Sequence[Any]) -> bytes:
    """Write what both mice report in 8 ms, held as `hands` (`simulated_operator.Hand`)."""
    held = zip(mice, hands, strict=True)
    return b"".join(frame(k, r) for k, (mouse, hand) in enumerate(held) for r in mouse.tick(*hand))


def serve(mice: Any, path: Path) -> None:
    """Let the mice report what comes in through a socket, in a thread."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while len(head := self.rfile.read(2)) == 2:
                mice[head[0]].push(self.rfile.read(head[1]))

    path.unlink(missing_ok=True)
    server = socketserver.ThreadingUnixStreamServer(str(path), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()


def main() -> None:
    from serl_chunk import main as serl_chunk

    folder = Path(sys.argv[1])
    with fake_hid.installed(folder) as hid:
        mice = [hid.mouse(name) for name in NAMES]
        serve(mice, folder / SOCKET)
        raise SystemExit(serl_chunk.main(sys.argv[2:]))


if __name__ == "__main__":
    main()
