"""Converting camera episodes to LeRobot, beside writing the same encoded images with pyarrow alone, on the same cores.

    python benchmarks/data_conversion.py [--episodes N] [--steps T] [--codec png|jpeg] [--stored raw|jpeg] [--demos DIR]

Episodes of three cameras of 480x640, smooth pictures that move, are written as HDF5 first; `--demos` takes a folder of
recorded ones instead. Then, in turns: the conversion (`serl-chunk data convert --to lerobot`), and a bare contestant
that reads the same HDF5 arrays in as many processes, encodes with the same library and writes row groups with pyarrow:
no checks, no manifest, nothing that survives an interruption, no statistics. Medians over the repetitions.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import h5py
import numpy as np
from PIL import Image

CAMERAS = ("cam_high", "cam_left_wrist", "cam_right_wrist")
HEIGHT, WIDTH, JOINTS, QUALITY = 480, 640, 14, 95


def pictures(steps: int, seed: int) -> np.ndarray:
    """Smooth moving pictures with some noise, uint8[T, H, W, 3]."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.float32)
    noise = rng.integers(0, 6, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    out = np.empty((steps, HEIGHT, WIDTH, 3), np.uint8)
    for t in range(steps):
        waves = [np.sin((x + 3 * t) / (40 + 9 * c)) + np.cos((y - 2 * t) / (55 + 7 * c)) for c in range(3)]
        out[t] = (np.stack(waves, -1) * 55 + 120).astype(np.uint8) + noise
    return out


def encode(image: np.ndarray, codec: str) -> bytes:
    """One image file, as the converter makes it."""
    file = io.BytesIO()
    if codec == "png":
        Image.fromarray(image).save(file, "PNG", compress_level=1)
    else:
        Image.fromarray(image).save(file, "JPEG", quality=QUALITY, subsampling=0)
    return file.getvalue()


def make(folder: Path, episodes: int, steps: int, stored: str) -> None:
    """ALOHA files: raw frames, or rows of JPEG padded with zeros."""
    rng = np.random.default_rng(0)
    for e in range(episodes):
        with h5py.File(folder / f"episode_{e}.hdf5", "w") as file:
            file.attrs.update({"sim": True, "color": "rgb", "hz": 50.0, "compress": stored == "jpeg"})
            file["/observations/qpos"] = np.cumsum(rng.normal(0, 0.01, (steps, JOINTS)), 0).astype(np.float32)
            file["/action"] = np.cumsum(rng.normal(0, 0.01, (steps, JOINTS)), 0).astype(np.float32)
            for c, camera in enumerate(CAMERAS):
                frames = pictures(steps, 10 * e + c)
                if stored == "jpeg":
                    rows = [encode(f, "jpeg") for f in frames]
                    padded = np.zeros((steps, max(map(len, rows))), np.uint8)
                    for t, row in enumerate(rows):
                        padded[t, : len(row)] = np.frombuffer(row, np.uint8)
                    frames = padded
                file.create_dataset(f"/observations/images/{camera}", data=frames, chunks=(1, *frames.shape[1:]))


def bare_episode(path: str, codec: str) -> tuple[dict[str, np.ndarray], dict[str, list[bytes]]]:
    with h5py.File(path) as file:
        numbers = {"observation.state": file["/observations/qpos"][()], "action": file["/action"][()]}
        images = {}
        for camera, data in file["/observations/images"].items():
            frames = (data[t] for t in range(len(data)))
            images[camera] = (
                [encode(f, codec) for f in frames]
                if data.ndim == 4
                else [bytes(f[: int(np.flatnonzero(f)[-1]) + 1]) for f in frames]
            )
    return numbers, images


def bare(folder: Path, out: Path, codec: str, workers: int) -> None:
    """Encode in processes, write row groups with pyarrow, one file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    paths = sorted(map(str, folder.glob("*.hdf5")))
    writer = None
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for numbers, images in pool.map(bare_episode, paths, itertools.repeat(codec)):
            columns = {k: pa.FixedSizeListArray.from_arrays(v.ravel(), v.shape[1]) for k, v in numbers.items()}
            for camera, files in images.items():
                names = pa.nulls(len(files), pa.string())
                columns[f"observation.images.{camera}"] = pa.StructArray.from_arrays(
                    [pa.array(files, pa.binary()), names], ["bytes", "path"]
                )
            table = pa.table(columns)
            writer = writer or pq.ParquetWriter(out, table.schema, compression="none", use_dictionary=False)
            writer.write_table(table)
    if writer is not None:
        writer.close()
    with out.open("rb") as file:
        os.fsync(file.fileno())


def ours(folder: Path, out: Path, codec: str, workers: int) -> None:
    command = [sys.executable, "-m", "serl_chunk", "data", "convert", str(folder), "--to", "lerobot", "--out", str(out)]
    command += ["--image_codec", codec, "--workers", str(workers), "--success", "--hz", "50"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--codec", choices=("png", "jpeg"), default="png")
    parser.add_argument("--stored", choices=("raw", "jpeg"), default="raw")
    parser.add_argument("--demos", metavar="DIR", help="recorded episodes instead of made ones")
    parser.add_argument("--folder", metavar="DIR", default=".", help="where everything is written")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        root = Path(scratch)
        source = Path(args.demos) if args.demos else root / "source"
        if not args.demos:
            source.mkdir()
            make(source, args.episodes, args.steps, args.stored)
        with h5py.File(sorted(source.glob("*.hdf5"))[0]) as file:
            cameras = len(file["/observations/images"])
        frames = 0
        for path in source.glob("*.hdf5"):
            with h5py.File(path) as file:
                frames += sum(len(d) for d in file["/observations/images"].values())
        seconds: dict[str, list[float]] = {"ours": [], "bare": []}
        nbytes = 0
        for _ in range(args.repeats):
            for name, work in (("bare", bare), ("ours", ours)):
                out = root / name
                start = time.monotonic()
                work(source, out, args.codec, args.workers)
                seconds[name].append(time.monotonic() - start)
                if name == "bare":
                    nbytes = out.stat().st_size
                    out.unlink()
                else:
                    shutil.rmtree(out)
    print(
        f"{len(CAMERAS) if not args.demos else cameras} cameras, {frames} frames, {nbytes / 1e6:.0f} MB encoded, "
        f"{args.workers} processes, medians of {args.repeats}"
    )
    for name, values in seconds.items():
        s = statistics.median(values)
        print(f"{name:5} {s:7.2f} s {frames / s:8.0f} frames/s {nbytes / s / 1e6:8.1f} MB/s")
    print(f"ours / bare: {statistics.median(seconds['ours']) / statistics.median(seconds['bare']):.2f} of its time")


if __name__ == "__main__":
    main()
