"""The documentation's picture of the terminal console: a training actor of `fake_aloha` while its human intervenes.

    python benchmarks/console_picture.py [--out docs/figures/console.svg]

Starts a learner, and an actor in real time on a pseudo terminal, and takes what stands on the terminal while the
scripted human acts, after some episodes. Needs `pip install pyte`.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text
from support.ports import free_port

from serl_chunk.console.view import COLOURS, ActorState

COMMAND = [sys.executable, "-m", "serl_chunk"]
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
COLUMNS, ROWS = 104, 27
PATIENCE = 600.0  # seconds
TRAINING = (
    "--config.learner.pretrain_steps=1000", "--config.learner.warmup_episodes=1000",
    "--config.learner.critic_pretrain_steps=200", "--config.actor.clock=realtime", "--debug",
)  # fmt: skip


def is_big(screen: Any, word: ActorState) -> bool:
    """Whether the screen's big word has the colour of `word`."""
    cells = (char for row in screen.buffer.values() for char in row.values())
    return any(char.reverse and char.fg.replace("brown", "yellow") == COLOURS[word] for char in cells)


def coloured(screen: Any) -> Text:
    out = Text()
    for row in range(screen.lines):
        for column in range(screen.columns):
            char = screen.buffer[row][column]
            style = Style(
                color=None if char.fg == "default" else char.fg.replace("brown", "yellow"),
                bold=char.bold,
                reverse=char.reverse,
                dim=False,
            )
            out.append(char.data, style)
        out.append("\n")
    return out


def taken(episodes: int, folder: Path) -> Text:
    """Run an actor until the human acts in an episode after the first `episodes`."""
    try:
        import pyte
    except ImportError:
        raise SystemExit("needs pyte: pip install pyte") from None
    common = [*COMMAND, "--exp_name", "fake_aloha", *TRAINING, "--port", str(free_port())]
    demos = folder / "demos"
    subprocess.run([*COMMAND, "record", "--exp_name", "fake_aloha", "--policy", "scripted", "--out", demos], check=True)
    learner = subprocess.Popen(
        [*common, "--learner", "--demo_path", demos, "--checkpoint_path", folder / "run"], stdout=subprocess.DEVNULL
    )
    command = [*common, "--actor", "--ip", "127.0.0.1", "--viewer", "0", "--spool_path", str(folder / "spool")]
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE_TERMINAL, *command],
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(slave)
    screen = pyte.Screen(COLUMNS, ROWS)
    stream, begun, shown = pyte.ByteStream(screen), time.monotonic(), ""
    try:
        while time.monotonic() < begun + PATIENCE and process.poll() is None:
            if select.select([master], [], [], 0.2)[0]:
                stream.feed(os.read(master, 65536))
            shown = "\n".join(screen.display)
            if f"episode {episodes}:" in shown and is_big(screen, ActorState.HUMAN):
                return coloured(screen)
        raise SystemExit(f"no human acted within {PATIENCE:.0f} s:\n{shown}")
    finally:
        for each in (process, learner):
            each.terminate()
            each.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=20, help="that are over, a multiple of ten")
    parser.add_argument("--out", type=Path, default=Path("docs/figures/console.svg"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        picture = taken(args.episodes, Path(folder))
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor")
    console.print(picture, overflow="crop", no_wrap=True)
    svg = console.export_svg(title="serl-chunk --actor", theme=MONOKAI)
    args.out.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))  # they name addresses


if __name__ == "__main__":
    main()
