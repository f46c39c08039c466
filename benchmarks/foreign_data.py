"""Data sets by other projects' own writers, trained on by the line that an error prints.

    python benchmarks/foreign_data.py --python OTHER/bin/python ANOTHER/bin/python --json foreign_data.json

Of these environments each data set takes the first that has its package: minari[create,hdf5], lerobot, robomimic with
robosuite, gymnasium_robotics. It is written there, and a learner of this environment trains on it for 200 updates: as
it is, or with the flag that its error ends in.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support.cli_args import make_parser, write_figures
from support.foreign_experiment import UPDATES

from serl_chunk.version import version_info

HERE = Path(__file__).resolve().parent / "support"


class Case(NamedTuple):
    package: str
    sizes: str  # of the robot, see `foreign_experiment`


CASES = {
    "openpi": Case("lerobot", "8,7,1,10"),
    "parts": Case("lerobot", "7,7,1,10"),
    "minari": Case("minari", "3,1,2,20"),
    "robomimic": Case("robomimic", "19,7,1,20"),
    "goals": Case("gymnasium_robotics", "16,4,1,25"),
}


def learn(name: str, path: str, folder: Path, table: str | None) -> subprocess.CompletedProcess[str]:
    flags = ["--demo_fields", table] if table else []
    command = [
        sys.executable, "-m", "serl_chunk", "--exp_name", f"{HERE / 'foreign_experiment.py'}:{CASES[name].sizes}",
        "--learner", "--debug", "--demo_path", path, "--checkpoint_path", str(folder / f"run{len(flags)}"), *flags,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False)


def having(package: str, pythons: Sequence[str]) -> str:
    """Return the first interpreter of `pythons` that has `package`."""
    finds = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{package}') is None)"
    for python in pythons:
        if subprocess.run([python, "-c", finds], check=False).returncode == 0:
            return python
    raise SystemExit(f"none of {', '.join(pythons)} has {package}. Install it there")


def train(name: str, pythons: Sequence[str]) -> dict[str, Any]:
    """Write the data set `name` and train on it; returns what was needed and what came of it."""
    with tempfile.TemporaryDirectory() as text:
        folder, python = Path(text), having(CASES[name].package, pythons)
        writer = [python, str(HERE / "foreign_writers.py"), name, text]
        path = subprocess.run(writer, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1]
        package = CASES[name].package
        version = f"import importlib.metadata as m; print(m.version('{package.replace('_', '-')}'))"
        writer_version = subprocess.run([python, "-c", version], capture_output=True, text=True, check=True).stdout
        done, table = learn(name, path, folder, None), None
        if done.returncode and "--demo_fields " in done.stderr:
            table = done.stderr.rpartition("--demo_fields ")[2].split()[0]
            done = learn(name, path, folder, table)
        trained = f"{UPDATES} updates" in done.stdout + done.stderr
        print(f"{name}: {package} {writer_version.strip()}, {table or 'no flag'}: exit status {done.returncode}")
        if done.returncode or not trained:
            print(done.stdout[-2000:] + done.stderr[-2000:])
        return {"data": name, "package": package, "version": writer_version.strip(), "fields": table,
                "status": done.returncode, "trained": trained}  # fmt: skip


def main() -> None:
    p = make_parser(__doc__)
    p.add_argument("--python", required=True, nargs="+", help="interpreters of environments with the other projects")
    p.add_argument("--only", choices=CASES, help="one of them")
    args = p.parse_args()
    rows = [train(name, args.python) for name in CASES if args.only in (None, name)]
    write_figures(args, {"commit": version_info().commit, "updates": UPDATES, "runs": rows})
    raise SystemExit(0 if all(row["trained"] for row in rows) else 1)


if __name__ == "__main__":
    main()
