"""The documentation's pictures of the pages: an actor's (--viewer) and the episode viewer's (serl-chunk view).

    python benchmarks/pictures.py [--folder FOLDER] [--out docs/figures]

Records ten demonstrations of `fake_aloha_images`, pretrains on them for a minute, and lets the actor run episodes in
real time with the scripted human. A browser shows the actor's page: live_page.webp is taken while the human intervenes.
After some episodes the run is ended, and an episode with an intervention is opened in the viewer: viewer.webp. The task
is made easier than the experiment's (the cube is in the state), so that a minute is enough. Needs Debian's packages
`chromium` and `chromium-driver`, and `pip install selenium`.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from support.chromium import MISSING, Chromium
from support.ports import free_port

COMMAND = [sys.executable, "-m", "serl_chunk"]
ROBOT = ["--exp_name", "fake_aloha_images", "--config.robot.image_size=96", "--config.robot.observe_objects=true",
         "--config.robot.max_episode_steps=250"]  # fmt: skip
TRAINING = [
    "--config.agent.encoder.features=4,4,4,4", "--config.agent.encoder.latent=4", "--config.agent.encoder.shift=0",
    "--config.agent.encoder.trained_by=critic", "--config.learner.batch_size=32",
    "--config.learner.pretrain_steps=2500", "--config.learner.critic_pretrain_steps=400",
    "--config.learner.warmup_episodes=1000", "--config.actor.clock=realtime", "--debug",
]  # fmt: skip
PATIENCE = 900.0  # seconds, for pretraining and for all episodes
SIZE = (1360, 1040)  # pixels
# The human acts after a success, the plot of Q is full, a third of it the policy's, and each picture has come.
WORTH_SHOWING = (
    "state.word === 'HUMAN' && state.ticks.length >= 450 && state.ticks.at(-25).by === 'human'"
    " && state.ticks.filter((t) => t.by === 'policy').length > 160"
    " && [...document.querySelectorAll('figure img')].length === 3"
    " && !document.querySelector('figcaption.old') && at('cells').lastChild.textContent === 'success'"
)


@contextlib.contextmanager
def serving(*arguments: object) -> Iterator[str]:
    """Run a `serl-chunk` command that serves a page, and yield the page's address."""
    words = [*COMMAND, *map(str, arguments)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"http://127\S+", line):
                break
        else:
            raise SystemExit(f"{' '.join(words)} ended:\n{''.join(lines[-20:])}")
        threading.Thread(target=process.stdout.read, daemon=True).start()  # a full pipe would stop the process
        yield found[0]
    finally:
        process.terminate()
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()


def show_actor(demos: Path, run: Path, episodes: int, picture: Path) -> None:
    """Make a run of some episodes, and a picture of its actor's page."""
    where = ["--port", free_port(), "--viewer", 0, "--spool_path", run.parent / "spool"]
    flags = ["--learner", "--actor", "--demo_path", demos, "--checkpoint_path", run, *where]
    with serving(*ROBOT, *TRAINING, *flags) as url, Chromium(*SIZE) as window:
        window.open(url)
        while True:
            window.until(WORTH_SHOWING, PATIENCE)
            window.picture(picture)
            if window.js("state.word === 'HUMAN' && !document.querySelector('figcaption.old')"):
                break
        window.until(f"state.ticks.at(-1).episode > {episodes}", PATIENCE)
        assert window.faults == [], window.faults


def show_viewer(run: Path, picture: Path) -> None:
    with serving("view", run) as url, Chromium(*SIZE) as window:
        window.open(url)
        window.until("state.info && state.rows.length === state.info.total && state.episode")
        # A success in which about a third of the ticks were the human's.
        rows = [row for row in window.js("state.rows") if row["human"] and row["outcome"] == "success"]
        if not rows:
            raise SystemExit("no episode with an intervention succeeded: pass a greater --episodes")
        chosen = min(rows, key=lambda row: abs(row["human"] - 0.3))["number"]
        window.js(f"choose({chosen})")
        window.until(f"state.chosen === {chosen} && state.episode.id === state.rows[{chosen}].key.split('/').at(-1)")
        first, past, _ = window.js("state.episode.actors.find((part) => part[2] === 'human')")
        window.js(f"seek({(first + past) // 2})")
        window.until("[...document.querySelectorAll('figure img')].every((i) => i.complete && i.naturalWidth > 0)")
        window.picture(picture)
        assert window.faults == [], window.faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=25, help="of the run")
    parser.add_argument("--folder", type=Path, help="for demonstrations and run, which are kept")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="folder of both pictures")
    args = parser.parse_args()
    if MISSING:
        parser.error(f"needs {' and '.join(MISSING)}")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        demos, run = folder / "demos", folder / "run"
        subprocess.run([*COMMAND, "record", *ROBOT, "--policy", "scripted", "--out", str(demos)], check=True)
        show_actor(demos, run, args.episodes, folder / "live_page.png")
        show_viewer(run, folder / "viewer.png")
        for name in ("live_page", "viewer"):  # without a loss, and half as large
            picture = Image.open(folder / f"{name}.png").convert("RGB")
            picture.save(args.out / f"{name}.webp", lossless=True, method=6)


if __name__ == "__main__":
    main()
