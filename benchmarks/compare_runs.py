"""Compare seeded runs of two checkouts bit for bit: recorded episodes, checkpoints, metric rows and an evaluation.

python benchmarks/compare_runs.py BASE NEW --json runs.json

Both checkouts need their `.venv` (`make .venv/installed`). Each case records demonstrations, trains on them with
`--local` (learner and actor in one process, in lockstep) and evaluates the last checkpoint, in each checkout with its
own command. Equal are: every array and attribute of the recorded files, the checksum of every array of every
checkpoint with the counters and the sampler's state, every metric row but for times, and every evaluated episode.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import h5py

SMALL = (
    "learner.pretrain_steps=20", "learner.warmup_episodes=2", "learner.max_steps=60",
    "learner.checkpoint_period=50", "learner.batch_size=16", "agent.critic.hidden=32,32",
)  # fmt: skip
FLOW = "agent.flow.hidden=32,32"
TIMED = (
    "wall",
    "seconds",
    "_per_s",
    "wait",
    "time",
    "mib",
    "bytes",
    "lateness",
    "_ms",
)  # parts of names that measure time


class Case(NamedTuple):
    """An experiment, how much is recorded for it, and the settings of its training."""

    exp_name: str
    n_demos: int
    settings: tuple[str, ...]


CASES = {
    "flow": Case("fake_aloha", 3, (*SMALL, FLOW)),
    "grasp_critic": Case("fake_aloha_discrete_gripper", 3, (*SMALL, FLOW)),
    "single_arm": Case("fake_single_arm", 3, (*SMALL, FLOW)),
    "gaussian": Case("fake_aloha", 2, (*SMALL, "preset=qc-rlpd")),
    "images": Case("fake_aloha_images", 2, (*SMALL, FLOW, "learner.max_steps=20", "learner.pretrain_steps=5")),
}


def run(checkout: Path, *arguments: str) -> None:
    """Run `serl-chunk` in a checkout. Raises SystemExit with its output where it fails."""
    words = [str(checkout / ".venv/bin/python"), "-m", "serl_chunk", *arguments]
    done = subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def flags_of(case: Case) -> list[str]:
    """Return the command line's form of the settings; the last one of a field counts."""
    values = dict(setting.split("=", 1) for setting in case.settings)
    preset = values.pop("preset", None)
    return [*(["--preset", preset] if preset else []), *(f"--config.{name}={value}" for name, value in values.items())]


def digest(*parts: Any) -> str:
    """Return a short digest of values that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def recorded(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, digest) of every array and attribute of the HDF5 files in a folder."""
    for path in sorted(folder.glob("*.hdf5")):
        with h5py.File(path) as file:
            nodes: dict[str, Any] = {"/": file}
            file.visititems(nodes.__setitem__)
            for name, node in nodes.items():
                for key, value in sorted(node.attrs.items()):
                    yield f"{path.name}{name}@{key}", digest(repr(value))
                if isinstance(node, h5py.Dataset):
                    content = hashlib.sha256(node[()].tobytes()).hexdigest()
                    yield f"{path.name}/{name}", digest(node.dtype.str, node.shape, content)


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dictionaries under their dotted names."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{name}.{key}")
    else:
        yield name, value


def trained(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, digest) of the checkpoints' content, the metric rows and the evaluated episodes of a run folder."""
    for path in sorted(folder.glob("checkpoints/*/meta/metadata")):
        content = json.loads(path.read_text())["content"]
        content.pop("serl_chunk", None)  # version and commit
        content.pop("serl_chunk", None)  # version and commit
        for name, value in leaves(content, f"checkpoint {path.parent.parent.name}"):
            yield name, digest(value)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for number, row in enumerate(r for r in rows if r["kind"] != "event"):
        for name, value in leaves(row, f"row {number}"):
            if not any(part in name.lower() for part in TIMED):
                yield name, digest(value)
    for path in sorted(folder.glob("evaluations/*.json")):
        for number, episode in enumerate(json.loads(path.read_text()).get("episodes", ())):
            for name, value in leaves(episode, f"evaluation of {path.stem.split('_')[0]}, episode {number}"):
                if not any(part in name.lower() for part in TIMED):
                    yield name, digest(value)


def digests(checkout: Path, case: Case, folder: Path) -> dict[str, str]:
    """Record, train and evaluate in a checkout; return the digests of what it wrote, by name."""
    demos, trained_in = folder / "demos", folder / "run"
    shared = ["--exp_name", case.exp_name]
    run(checkout, "record", *shared, "--n_demos", str(case.n_demos), "--out", str(demos))
    shared += flags_of(case)
    of_run = ["--debug", "--checkpoint_path", str(trained_in)]
    run(checkout, *shared, "--local", "--seed", "3", "--demo_path", str(demos), *of_run)
    run(checkout, *shared, "--actor", "--eval_checkpoint_step", "latest", "--eval_n_trajs", "3", *of_run[1:])
    return dict(recorded(demos)) | dict(trained(trained_in))


def main() -> int:
    """Compare the cases; return 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, metavar="BASE", help="checkout to compare with")
    parser.add_argument("new", type=Path, metavar="NEW", help="checkout that is compared")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of: {', '.join(CASES)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts and the names that differ")
    flags = parser.parse_args()
    figures: dict[str, Any] = {}
    for name in flags.cases.split(","):
        if name not in CASES:
            parser.error(f"--cases: unknown case {name!r}; valid: {', '.join(CASES)}")
        with tempfile.TemporaryDirectory() as folder:
            old, new = (
                digests(checkout.resolve(), CASES[name], Path(folder) / side)
                for side, checkout in (("base", flags.base), ("new", flags.new))
            )
        differing = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
        figures[name] = {"values": len({*old, *new}), "differing": differing}
        print(f"{name}: {len({*old, *new})} values, {len(differing)} differ", flush=True)
        for key in differing[:20]:
            print(f"  {key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}")
    if flags.json:
        flags.json.write_text(json.dumps(figures, indent=2) + "\n")
    return int(any(case["differing"] for case in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
