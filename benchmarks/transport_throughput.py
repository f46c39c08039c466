"""What the transport moves over loopback between two processes, beside bare DEALER/ROUTER sockets in the same run.

    python benchmarks/transport_throughput.py [--json FILE]

Rows per second count from the first hand-over to the last acknowledgement. The bare sockets send the same arrays, one
message a row, with a window of 64 messages and an acknowledgement for every 16, and decode nothing: a ceiling.
Snapshots are timed from the learner's call of `publish` until the actor holds the whole of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np
import zmq
from loopback import connected, other_process, serving

from serl_chunk.transport.client import LearnerLink
from serl_chunk.transport.sockets import free_port
from serl_chunk.types import Begin, End, Outcome, Snapshot, Source, Step

CAMERAS = ("top", "left", "right")
WINDOW, ACK_EVERY = 64, 16
EPISODE = 300  # steps: 44 MB with three cameras
SNAPSHOT_BYTES = 10 << 20


def learner(port: int, pipe: Connection) -> None:
    """The other process: a server that publishes when told to."""
    rng = np.random.default_rng(0)
    version = 0
    with serving(port, pipe) as server:
        while pipe.recv() == "publish":
            params = {f"layer{i}": rng.random(SNAPSHOT_BYTES // 40, np.float32) for i in range(10)}
            version += 1
            start = time.monotonic()  # one clock for all processes of a machine
            server.publish(Snapshot(version, params), {"at": start})
            pipe.send(time.monotonic() - start)


def bare(port: int, pipe: Connection) -> None:
    """The other process of the bare sockets: counts rows, acknowledges every sixteenth."""
    context = zmq.Context()
    s = context.socket(zmq.ROUTER)
    s.linger = 0
    s.bind(f"tcp://127.0.0.1:{port}")
    pipe.send("ready")
    rows = 0
    while True:
        frames = s.recv_multipart(copy=False)
        if len(frames) == 2:  # the end
            break
        rows += 1
        if rows % ACK_EVERY == 0:
            s.send_multipart([frames[0].bytes, b"%d" % rows])
    context.destroy(linger=0)


def make_steps(n: int, images: bool) -> list[Step]:
    """`n` steps of a 14-joint robot. Sixteen distinct sets of noise images take turns, as a camera's buffers do."""
    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 256, (3, 128, 128, 3), np.uint8) for _ in range(16 if images else 0)]
    steps = []
    for tick in range(n):
        observation = {"state": rng.random(14, np.float32)}
        if images:
            observation.update({f"images/{c}": frames[tick % 16][i] for i, c in enumerate(CAMERAS)})
        steps.append(Step(tick, observation, rng.random(14, np.float32), 0.0, Source.POLICY, tick, 1, 0.02 * tick))
    return steps


def ours(steps: list[Step], link: LearnerLink, episode: str) -> float:
    """Rows per second of episodes through the transport, handed over as fast as it takes them."""
    start = time.monotonic()
    for first in range(0, len(steps), EPISODE):
        part = steps[first : first + EPISODE]
        link.begin(Begin(f"{episode}/{first}"))
        for step in part:
            link.step(step)
        link.end(End(f"{episode}/{first}", len(part), None, True, False, Outcome.SUCCESS))
    if not link.flush(120):
        raise SystemExit("the learner did not acknowledge everything")
    return len(steps) / (time.monotonic() - start)


def bare_rows(steps: list[Step], port: int) -> float:
    """Rows per second of the same arrays over bare sockets."""
    process, _pipe = other_process(bare, port)
    context = zmq.Context()
    s = context.socket(zmq.DEALER)
    s.linger = 1000
    s.connect(f"tcp://127.0.0.1:{port}")
    sent = acked = 0
    start = time.monotonic()
    for step in steps:
        while sent - acked >= WINDOW:
            acked = int(s.recv())
        s.send_multipart([b"header", step.action, *step.observation.values()], copy=False)
        sent += 1
    while acked < sent // ACK_EVERY * ACK_EVERY:
        acked = int(s.recv())
    rate = sent / (time.monotonic() - start)
    s.send(b"end")
    process.join(10)
    context.destroy(linger=0)
    return rate


def snapshot_times(link: LearnerLink, pipe: Connection, n: int) -> tuple[list[float], list[float]]:
    """Seconds from `publish` to a complete snapshot, and seconds `publish` itself took."""
    arrivals, calls = [], []
    for _ in range(n):
        before = link.latest()
        pipe.send("publish")
        if not link.wait_until(lambda before=before: link.latest() is not before, 30):  # type: ignore[misc]
            raise SystemExit("the snapshot did not arrive")
        arrivals.append(time.monotonic() - link.latest_info()["at"])
        calls.append(pipe.recv())
    return arrivals, calls


def main() -> None:
    """Print the figures, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement; the median counts")
    parser.add_argument("--state_rows", type=int, default=50_000)
    parser.add_argument("--camera_rows", type=int, default=3_000)
    args = parser.parse_args()
    result: dict[str, float] = {}
    port = free_port()
    process, pipe = other_process(learner, port)
    link = connected(port)
    for name, rows, images in (("state", args.state_rows, False), ("camera", args.camera_rows, True)):
        steps = make_steps(rows, images)
        # Alternating, so that both meet the same disturbances.
        pairs = [(ours(steps, link, f"{name}{i}"), bare_rows(steps, free_port())) for i in range(args.repeats)]
        result[f"{name}_rows_per_s"] = statistics.median(p[0] for p in pairs)
        result[f"{name}_bare_rows_per_s"] = statistics.median(p[1] for p in pairs)
        result[f"{name}_share_of_bare"] = result[f"{name}_rows_per_s"] / result[f"{name}_bare_rows_per_s"]
    arrivals, calls = snapshot_times(link, pipe, 20)
    result["snapshot_10mb_ms"] = 1000 * statistics.median(arrivals)
    result["publish_call_ms"] = 1000 * statistics.median(calls)
    result["publish_call_max_ms"] = 1000 * max(calls)
    link.close()
    pipe.send("stop")
    process.join(10)
    for key, value in result.items():
        print(f"{key:28s} {value:12.2f}")
    if args.json:
        with open(args.json, "w") as f:
            json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()
