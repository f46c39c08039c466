"""A moving picture of a run that learns: the same start states, acted by several of its checkpoints, side by side.

python benchmarks/learning_film.py RUN --steps 0,2000,12000 --out learning.webp

RUN is a run folder of `fake_aloha`, such as one of `learn_fake_aloha.py`. Each checkpoint is evaluated by
`serl-chunk --actor --eval_checkpoint_step N --save_video` with larger camera frames. The first camera of its episodes
becomes a column, a start state a row; a green frame marks an episode that ended in success. Needs the extras `video`
and `lerobot` (PyAV reads the videos).
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIZE = 208  # pixels of a camera's frame, of which the middle strip is shown
STRIP = (0.29, 0.71)
TITLE = 26  # pixels above each column
BORDER = 4
GREEN, GREY, INK = (26, 150, 65), (225, 225, 225), (40, 40, 40)
STILL = 1.2  # seconds for which the last frames stay


def frames_of(video: Path) -> list[np.ndarray]:
    """Return the first camera's frames uint8[H, W, 3]."""
    with av.open(str(video)) as container:
        return [frame.to_ndarray(format="rgb24")[:SIZE, :SIZE] for frame in container.decode(video=0)]


def films(run: Path, step: int, n_starts: int, settings: list[str]) -> list[tuple[list[np.ndarray], bool]]:
    """Evaluate a checkpoint; return frames and success of each start state, in their order."""
    words = [
        sys.executable, "-m", "serl_chunk", "--exp_name", "fake_aloha", "--actor", "--save_video",
        "--eval_checkpoint_step", str(step), "--eval_n_trajs", str(n_starts), "--checkpoint_path", str(run),
        f"--config.robot.image_size={SIZE}", *(f"--config.{setting}" for setting in settings),
    ]  # fmt: skip
    videos = run / "videos"
    shutil.rmtree(videos, ignore_errors=True)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [(frames_of(path), path.stem.endswith("_success")) for path in sorted(videos.rglob("*.mp4"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder of the experiment fake_aloha")
    parser.add_argument("--steps", default="0,2000,12000", help="checkpoints, comma-separated")
    parser.add_argument("--starts", type=int, default=6, help="start states")
    parser.add_argument("--speed", type=float, default=0.5, help="of real time")
    parser.add_argument("--every", type=int, default=3, help="show every n-th frame")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="settings of the run")
    parser.add_argument("--out", type=Path, default=Path("learning.webp"), help="animated .webp or .gif")
    flags = parser.parse_args()
    steps = [int(step) for step in flags.steps.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        shutil.copytree(flags.run, run, ignore=shutil.ignore_patterns("journal", "videos", "evaluations"))
        columns = [films(run, step, flags.starts, flags.set) for step in steps]
    top, bottom = (int(SIZE * part) for part in STRIP)
    cell = (SIZE + 2 * BORDER, bottom - top + 2 * BORDER)
    longest = max(len(frames) for frames, _ in itertools.chain(*columns))
    font = ImageFont.load_default(size=15)
    pictures = []
    for tick in range(0, longest + flags.every, flags.every):
        picture = Image.new("RGB", (len(columns) * cell[0], TITLE + flags.starts * cell[1]), "white")
        draw = ImageDraw.Draw(picture)
        for x, (step, column) in enumerate(zip(steps, columns, strict=True)):
            title = f"{step:,} updates" if step else "cloned from 10 demonstrations"
            draw.text(((x + 0.5) * cell[0], TITLE / 2), title, INK, font, anchor="mm")
            for y, (frames, success) in enumerate(column):
                corner = (x * cell[0], TITLE + y * cell[1])
                ended = tick >= len(frames) - 1
                box = (*corner, corner[0] + cell[0] - 1, corner[1] + cell[1] - 1)
                draw.rectangle(box, fill=GREEN if ended and success else GREY)
                frame = frames[min(tick, len(frames) - 1)][top:bottom]
                picture.paste(Image.fromarray(frame), (corner[0] + BORDER, corner[1] + BORDER))
        pictures.append(picture)
    period = 1000 * flags.every / 50 / flags.speed
    durations = [round(period)] * (len(pictures) - 1) + [round(1000 * STILL)]
    pictures[0].save(
        flags.out, save_all=True, append_images=pictures[1:], duration=durations, loop=0, quality=70, method=4
    )
    print(
        f"{flags.out}: {len(pictures)} pictures of {picture.size[0]}x{picture.size[1]}, {flags.out.stat().st_size:,} B"
    )


if __name__ == "__main__":
    main()
