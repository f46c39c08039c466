"""The documentation's picture of the terminal console: a training actor of `fake_aloha` while its human intervenes.

    python benchmarks/console_picture.py [--out docs/figures/console.svg]

Starts `serl-chunk --learner --actor` in real time on a pseudo terminal, presses enter where it waits, and takes what
stands on the terminal once the word is HUMAN and some episodes are over. Needs `pip install pyte`.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text
from support.ports import free_port

try:
    import pyte
except ImportError:
    raise SystemExit("console_picture.py needs pyte: pip install pyte") from None

COLUMNS, ROWS = 104, 27
PATIENCE = 600.0  # seconds
TRAINING = (
    "--config.learner.pretrain_steps=1000", "--config.learner.warmup_episodes=1000",
    "--config.learner.critic_pretrain_steps=200", "--config.actor.clock=realtime", "--debug",
)  # fmt: skip


def coloured(screen: pyte.Screen) -> Text:
    """What stands on the screen, with its colours."""
    out = Text()
    for row in range(screen.lines):
        for column in range(screen.columns):
            char = screen.buffer[row][column]
            style = Style(
                color=None if char.fg == "default" else char.fg.replace("brown", "yellow"),
                bold=char.bold, reverse=char.reverse, dim=False,
            )  # fmt: skip
            out.append(char.data, style)
        out.append("\n")
    return out


def taken(episodes: int, folder: Path) -> Text:
    """Run an actor until the human acts in an episode after the first `episodes`."""
    command = [
        sys.executable, "-m", "serl_chunk", "--learner", "--actor", "--exp_name", "fake_aloha", *TRAINING,
        "--checkpoint_path", str(folder / "run"), "--spool_path", str(folder / "spool"), "--port", str(free_port()),
    ]  # fmt: skip
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    take_terminal = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", take_terminal, *command],
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(slave)
    screen = pyte.Screen(COLUMNS, ROWS)
    stream, begun, pressed = pyte.ByteStream(screen), time.monotonic(), 0.0
    try:
        while time.monotonic() < begun + PATIENCE and process.poll() is None:
            if select.select([master], [], [], 0.2)[0]:
                stream.feed(os.read(master, 65536))
            shown = "\n".join(screen.display)
            if "WAITING" in shown and time.monotonic() > pressed + 2:
                os.write(master, b"\r")
                pressed = time.monotonic()
            if "HUMAN" in shown and f"episode {episodes}" in shown:
                return coloured(screen)
        raise SystemExit(f"no human acted within {PATIENCE:.0f} s:\n{shown}")
    finally:
        process.terminate()
        process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=5, help="that are over")
    parser.add_argument("--out", type=Path, default=Path("docs/figures/console.svg"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        picture = taken(args.episodes, Path(folder))
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor")
    console.print(picture, overflow="crop", no_wrap=True)
    args.out.write_text(console.export_svg(title="serl-chunk --actor", theme=MONOKAI))


if __name__ == "__main__":
    main()
