"""The small run that the package ships (`serl-chunk example`), made of a run of `make demo`.

python benchmarks/example_run.py runs/demo --out serl_chunk/runs/example.zip

It keeps the configuration, the metrics, one checkpoint and 20 episodes: early ones in which a human acted, failures,
and the newest. The checkpoint keeps what acts, rounded as `transport.snapshot_dtype=bfloat16` does, and the normaliser:
no optimiser, so that no learner goes on from it. Paths and names of machines are left out. Of one run it always has the
same arrays, records and rows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np

from serl_chunk.runs.checkpoints import CheckpointStore, Saves
from serl_chunk.runs.checkpoints import Content as CheckpointContent
from serl_chunk.runs.episodes import JOURNAL, RunSource
from serl_chunk.runs.folder import CONFIG, read_config, write_json
from serl_chunk.runs.journal_index import LIMITS
from serl_chunk.runs.metrics import METRICS_FILE
from serl_chunk.transport.storage.record_store import RecordStore, SessionState, Verdict
from serl_chunk.transport.wire.records import Item, encode_record
from serl_chunk.types import Outcome

EPISODES = 20
OF_HUMANS, FAILED = 5, 3  # of them
OF_PATHS = ("commit_success.txt", "lock")  # orbax writes the first for people, and a journal's lock is empty


def chosen(source: RunSource) -> list[str]:
    """Return the keys of the episodes, in the order in which they ended."""
    keys = source.keys()
    human = [key for key in keys if source.about(key).human_steps][:OF_HUMANS]
    failed = [key for key in keys if source.about(key).outcome is not Outcome.SUCCESS and key not in human][:FAILED]
    newest = [key for key in keys if key not in (*human, *failed)][-(EPISODES - len(human) - len(failed)) :]
    return sorted([*human, *failed, *newest], key=keys.index)


def write_journal(folder: Path, source: RunSource, keys: list[str]) -> None:
    """Write the journal of an actor that recorded these episodes alone."""
    store = RecordStore(folder, LIMITS)
    list(store.replay())
    sessions: dict[str, SessionState] = {}
    for key in keys:
        session, _, _ = key.rpartition("/")
        state = sessions.setdefault(session, SessionState(session, source.about(key).actor_id, 1, 0, 0, 0, None))
        for record in source.read(key):
            item = Item.of(record, state.expected)
            delivered = state.judge(item) is Verdict.NEW
            store.append(state, item, encode_record(record, item.first), delivered=delivered)
            state = state.after(item, delivered=delivered)
        sessions[session] = state
    store.close()


def rounded(x: np.ndarray) -> np.ndarray:
    """Return float32 numbers as bfloat16 has them."""
    return x.astype(ml_dtypes.bfloat16).astype(x.dtype) if x.dtype == np.float32 else x


def write_checkpoint(run: Path, folder: Path, step: int) -> None:
    """Write the policy of a checkpoint, and nothing that a resume would need."""
    policy = CheckpointStore(run).restore_policy(step)
    meta = {name: value for name, value in policy.meta.items() if name != "checksums"} | {"policy": {}}
    params = {name: rounded(x) for name, x in policy.params.items()}
    content = CheckpointContent({"policy": params, "normaliser": policy.normaliser}, meta, on_devices=False)
    Saves().begin_save(folder / str(step), content)()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("run", type=Path)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--step", type=int, help="of the checkpoint (default: the newest)")
    flags = p.parse_args()
    source = RunSource(flags.run)
    step = CheckpointStore(flags.run).steps()[-1] if flags.step is None else flags.step
    with tempfile.TemporaryDirectory() as scratch:
        example = Path(scratch) / "example"
        (example / "checkpoints").mkdir(parents=True)
        write_checkpoint(flags.run.absolute(), example / "checkpoints", step)
        write_journal(example / JOURNAL, source, chosen(source))
        config = read_config(flags.run)
        write_json(example / CONFIG, {name: value for name, value in config.items() if name != "process"})
        (example / METRICS_FILE).write_bytes((flags.run / METRICS_FILE).read_bytes())
        files = sorted(path for path in example.rglob("*") if path.is_file() and path.name not in OF_PATHS)
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(flags.out, "w") as archive:
            for path in files:
                entry = zipfile.ZipInfo(str(path.relative_to(example)))  # of 1980: no moment of its making
                archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    print(json.dumps({"bytes": flags.out.stat().st_size, "files": len(files), "step": step}))


if __name__ == "__main__":
    main()
