"""Checkpoints of openpi: released and training ones, PaliGemma's weights, and the export of our own parameters.

A checkpoint is a folder with `params/`, written by orbax, or `model.safetensors` of PyTorch, and with
`assets/<id>/norm_stats.json`. Training checkpoints have one more name, `value`, at the end of every path.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from serl_chunk.config.agents.pi0 import Pi0Config
from serl_chunk.config.experiment import NormaliserConfig
from serl_chunk.data.normalise.chunk_statistics import read_norm_stats
from serl_chunk.io import os_reason
from serl_chunk.models.pi0.tree import GROUPS, LORA_A, LORA_B, Leaf, flat, initial_leaf, leaves, nested
from serl_chunk.runs.checkpoints import alone
from serl_chunk.runs.pytorch_checkpoints import TENSOR_GROUPS, assembled, stored_tensors, tensors_of
from serl_chunk.types import DataError

_PARAMS, _ASSETS, _STATS, _PYTORCH = "params", "assets", "norm_stats.json", "model.safetensors"
_NAMED = 5  # parameters that a refusal lists
_VALUE = "value"  # the last name of each path in training checkpoints
_PIECE_BYTES = 8 * 1024**2  # of an array that are written as one piece, or read at once from an archive

Place = Callable[[Leaf, np.ndarray], Any]  # (parameter, its numbers) -> what the tree holds in its place


class Stored(Protocol):
    """An array of a checkpoint that is not read yet."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    def read(self, dtype: str) -> np.ndarray:
        """Read it, piece by piece, into an array of `dtype`."""
        ...


class Checkpoint:
    """A checkpoint that was opened and not read.

    `path`: a folder with `params/` or `model.safetensors`, one of these itself, or PaliGemma's `.npz`.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self._only: tuple[str, ...] = ()  # groups of parameters that such a file has; empty: all
        file = self.path / _PYTORCH if self.path.is_dir() else self.path
        self._pytorch = file.suffix == ".safetensors" and file.is_file()
        if self._pytorch:
            with _reading(file):
                self.stored: dict[str, Stored] = dict(stored_tensors(file))
            return
        if self.path.suffix == ".npz" and self.path.is_file():
            self.stored = dict(_members(self.path))
            self._only = ("siglip", "vlm")
            return
        inner = self.path / _PARAMS
        folder = inner if (inner / "_METADATA").is_file() else self.path
        if not (folder / "_METADATA").is_file():
            wanted = f"a folder of openpi with params/_METADATA or {_PYTORCH}, or PaliGemma's .npz"
            raise DataError(f"{path}: no checkpoint of pi0 (expected {wanted}). Give the folder of one step.")
        self.stored = dict(_arrays(folder))

    def group_of(self, name: str) -> str:
        """Return the group of one of the stored parameters; "unknown" for one that no pi0 has."""
        if self._pytorch:
            return next(group for part, group in TENSOR_GROUPS.items() if part in name)
        return next((group for group, pattern in GROUPS.items() if re.fullmatch(pattern, name)), "unknown")

    def norm_stats(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of states and actions by the id of their data set."""
        found = {}
        for file in sorted((self.path / _ASSETS).rglob(_STATS)):
            with _reading(file):
                name = str(file.parent.relative_to(self.path / _ASSETS))
                found[name] = json.loads(file.read_text())["norm_stats"]
        return found

    def load(
        self, config: Pi0Config, key: jax.Array | None = None, place: Place = lambda leaf, array: array
    ) -> dict[str, Any]:
        """Read the parameters of `config`, each in the dtype that it has there.

        The largest come first, piece by piece, so that the memory needed is little above that of the result. An array
        that was written as one piece is also read as one; an export of it has small pieces.

        Args:
            key: of initial values: of LoRA where the checkpoint has none, and of all that PaliGemma lacks.
            place: called with each parameter and its numbers; puts them on a device.

        Raises DataError: names up to five parameters that are missing, unknown, or of another shape.
        """
        wanted = leaves(config)
        new = self._check(wanted)
        if new and key is None:
            raise DataError(f"{self.path}: {new[0]} is missing, and there is no key for initial values. Pass one.")
        tree = {}
        for leaf in sorted(wanted.values(), key=lambda leaf: -math.prod(leaf.shape)):
            if leaf.path in new:
                assert key is not None
                array = np.asarray(initial_leaf(leaf, key))
            else:
                with _reading(self.path):
                    array = self._read(leaf)
            tree[leaf.path] = place(leaf, array)
            del array
        return nested(tree)

    def _check(self, wanted: Mapping[str, Leaf]) -> list[str]:
        """Return the paths of parameters that are to be initialised."""
        if not self._only and not any(path.startswith("action_") for path in self.stored):
            raise DataError(
                f"{self.path}: a checkpoint of pi0-FAST, or of PaliGemma alone: it has no action expert. Only pi0 and "
                "pi0.5 are run: give one of these, such as openpi's pi0_base or pi05_base."
            )
        new, known, faults = [], set[str](), {}
        for path, leaf in wanted.items():
            shapes = self._shapes(leaf)
            known |= shapes.keys()
            may_be_new = leaf.group.endswith("_lora") or (self._only and leaf.group not in self._only)
            if may_be_new and not self.stored.keys() & shapes.keys():
                new.append(path)
                continue
            for name, shape in shapes.items():
                if name not in self.stored:
                    faults[name] = "is missing"
                elif self.stored[name].shape != shape:
                    faults[name] = f"has shape {self.stored[name].shape}, the model's is {shape}"
        for name in self.stored.keys() - known:
            of = "LoRA there" if name.endswith((LORA_A, LORA_B)) else "such parameter"
            faults[name] = f"is unknown: the model has no {of}"
        if faults:
            listed = [f"{name} {faults[name]}" for name in sorted(faults)[:_NAMED]]
            more = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
            remedy = "Set the preset and sizes of agent.pi0 that the checkpoint was made with"
            raise DataError(f"{self.path}: {'; '.join(listed)}{more}. {remedy}.")
        return new

    def _shapes(self, leaf: Leaf) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of what is stored of a parameter."""
        return {t.name: t.shape for t in tensors_of(leaf)} if self._pytorch else {leaf.path: leaf.shape}

    def _read(self, leaf: Leaf) -> np.ndarray:
        if self._pytorch:
            return assembled(leaf, lambda name: self.stored[name].read(leaf.dtype))
        return self.stored[leaf.path].read(leaf.dtype)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # damage surfaces as any of a dozen types of orbax, tensorstore, numpy, zip and json
        raise DataError(
            f"{path}: cannot be read ({type(error).__name__}: {os_reason(error)}). Copy it again."
        ) from error


class _Array:
    """An array that orbax wrote."""

    def __init__(self, spec: dict[str, Any], shape: tuple[int, ...], dtype: str, context: Any) -> None:
        self.shape, self.dtype = shape, dtype
        self._spec, self._context = spec, context

    def read(self, dtype: str) -> np.ndarray:
        store = tensorstore.open(self._spec, open=True, context=self._context).result()
        cast = tensorstore.cast(store, np.dtype(dtype))
        pieces = [
            [slice(i, min(i + (step or n), n)) for i in range(0, n, step or n)]
            for n, step in zip(self.shape, store.chunk_layout.read_chunk.shape or self.shape, strict=True)
        ]
        if math.prod(map(len, pieces)) == 1:
            return np.asarray(cast.read().result())
        out = np.empty(self.shape, np.dtype(dtype))
        into = tensorstore.array(out, copy=False)
        for part in itertools.product(*pieces):
            into[part].write(cast[part]).result()
        return out


def _arrays(folder: Path) -> Iterator[tuple[str, Stored]]:
    """Iterate over (path, array) of a folder that orbax wrote."""
    jax.devices()  # raises where JAX cannot use its platform, which is no damage
    with _reading(folder):
        found = alone(ocp.PyTreeCheckpointHandler).metadata(folder).item_metadata.tree
        zarr = "zarr3" if json.loads((folder / "_METADATA").read_text()).get("use_zarr3") else "zarr"
        ocdbt = (folder / "manifest.ocdbt").is_file()
        flat_tree = {tuple(str(k.key) for k in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(found)}
    # Several pieces at a time would wait for each other in memory.
    context = tensorstore.Context({"data_copy_concurrency": {"limit": 1}, "file_io_concurrency": {"limit": 1}})
    first = int(all(path[0] == _PARAMS for path in flat_tree))
    last = -1 if all(path[-1] == _VALUE for path in flat_tree) else None
    for path, leaf in flat_tree.items():
        name = ".".join(path)
        store: dict[str, Any] = {"driver": "file", "path": f"{folder / name}/"}
        if ocdbt:
            store = {"driver": "ocdbt", "base": folder.as_uri() + "/", "path": f"{name}/"}
        spec = {"driver": zarr, "kvstore": store}
        yield "/".join(path[first:last]), _Array(spec, tuple(leaf.shape), str(np.dtype(leaf.dtype)), context)


class _Member:
    """An array of an `.npz`."""

    def __init__(self, file: Path, name: str) -> None:
        self._file, self._name = file, name
        with self._opened() as (_, shape, fortran, dtype):
            self.shape, self._fortran = shape, fortran
            self._stored = np.dtype(ml_dtypes.bfloat16) if dtype.kind == "V" else dtype  # numpy has no name for it
        self.dtype = str(self._stored)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Any, tuple[int, ...], bool, np.dtype[Any]]]:
        archive = np.load(self._file, allow_pickle=False)
        with _reading(self._file), archive, archive.zip.open(self._name) as member:
            new = np.lib.format.read_magic(member) >= (2, 0)
            header = np.lib.format.read_array_header_2_0 if new else np.lib.format.read_array_header_1_0
            yield member, *header(member)

    def read(self, dtype: str) -> np.ndarray:
        out = np.empty(math.prod(self.shape), np.dtype(dtype))
        step = _PIECE_BYTES // self._stored.itemsize
        with self._opened() as (member, *_):
            for i in range(0, out.size, step):
                part = out[i : i + step]
                data = member.read(part.size * self._stored.itemsize)
                part[:] = np.frombuffer(data, self._stored, part.size)
        return out.reshape(self.shape, order="F" if self._fortran else "C")


def _members(file: Path) -> Iterator[tuple[str, Stored]]:
    """Iterate over (path, array) of PaliGemma's weights, which the tree has below `PaliGemma`."""
    with _reading(file), np.load(file, allow_pickle=False) as archive:
        names = archive.zip.namelist()
    for name in names:
        yield f"PaliGemma/{name.removeprefix('params/').removesuffix('.npy')}", _Member(file, name)


def norm_stats_of(
    config: NormaliserConfig, asset_id: str = "", *, state_dims: int | None = None
) -> dict[str, dict[str, Any]] | None:
    """Return what `export` writes of a normaliser: statistics by an asset's id, by default the name of their folder.

    Of the first `state_dims` numbers of the state, None: of all. None where its transforms are not openpi's.
    """
    if config.actions != "openpi":
        return None
    file = Path(config.norm_stats)
    vectors, _ = read_norm_stats(file)
    dims = {"state": state_dims}
    plain = lambda value, dims: None if value is None else value[..., :dims].tolist()  # noqa: E731
    of = {name: {n: plain(v, dims.get(name)) for n, v in x._asdict().items()} for name, x in vectors.items()}
    return {asset_id or file.absolute().parent.name: of}


def export(
    folder: Path | str,
    config: Pi0Config,
    trained: Any,
    base: Any,
    norm_stats: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write a checkpoint in the released layout, which openpi reads: `params/`, and `assets/<id>/norm_stats.json`.

    Args:
        folder: must be absent or empty.
        trained, base: trees that together are the parameters of `config`, of any float dtype.
        norm_stats: statistics of states and actions by the id of their data set.

    Raises DataError: the folder holds something, or the parameters are not those of `config`.
    """
    folder = Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder}: is there already. Choose a folder that is absent or empty.")
    tree = nested(flat(base) | flat(trained))
    found, wanted = flat(tree), leaves(config)
    for path in sorted({*found, *wanted}):
        if path not in found or path not in wanted or found[path].shape != wanted[path].shape:
            which = "missing" if path not in found else f"of shape {found[path].shape}"
            expected = wanted[path].shape if path in wanted else "no such parameter"
            raise DataError(f"{path} is {which}, expected {expected}. Export with the run's own configuration.")
    pieces = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_PIECE_BYTES), tree)
    save = ocp.args.PyTreeSave({_PARAMS: tree}, save_args={_PARAMS: pieces})
    alone(ocp.PyTreeCheckpointHandler).save(folder / _PARAMS, args=save)
    for name, stats in (norm_stats or {}).items():
        file = folder / _ASSETS / name / _STATS
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"norm_stats": stats}, indent=2) + "\n")
