"""Compares our pi0 and pi0.5 with recorded numbers of openpi's.

Every case, a folder with `meta.json`, `inputs.npz` and `outputs.npz`, is run with its recorded parameters, observation
and draws: stages of the image tower, tokens, masks, positions, keys and values, velocity, loss, gradients, samples. All
sizes come from `meta.json`. Parameters come from the case's checkpoints, which are compared with each other, or follow
a rule. A DIR may also hold cases, such as those of `record_pi0.py`.

Prints, for each recorded array, the largest absolute difference, the largest difference relative to the array's largest
number, and a verdict. Exit status 0 only if every array of every case was compared and agrees:

- float32: 2e-5 absolute; keys and values 1e-5 relative where that is more (with heads of the released size they reach
  7, and rounding alone is 6e-5); gradients 1e-4 relative. Integers and masks exactly.
- bfloat16: 3e-2 relative.
- Gradients that are 0 in exact arithmetic are rounding alone: below the gradient's tolerance times the largest gradient
  norm of the same module. Where what was recorded is exactly 0, ours must be too.

python benchmarks/parity_pi0.py DIR...
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from support.pi0_case import Case, rule_leaf

from serl_chunk.models.pi0 import gemma, masks, siglip
from serl_chunk.models.pi0.pi0 import Pi0, interpolate, linear, time_features
from serl_chunk.models.pi0.tree import EXPERT, VLM, Params, flat, nested
from serl_chunk.runs.openpi_checkpoints import Checkpoint
from serl_chunk.types import IMAGE_PREFIX, DataError

ABSOLUTE, KEYS, GRADIENT, BFLOAT16 = 2e-5, 1e-5, 1e-4, 3e-2
ROUNDING = "MultiHeadDotProductAttention_0/key/bias"  # a bias of all logits of a query: no softmax depends on it
AUGMENTED = "augmented/"  # images that loss_train_aug was computed from


class Row(NamedTuple):
    name: str
    absolute: float
    relative: float
    verdict: str  # "ok", or what is wrong

    @property
    def good(self) -> bool:
        return self.verdict.startswith("ok")


def compared(name: str, ours: Any, recorded: Any, *, exact: bool, tolerance: float | None = None) -> Row:
    """Compare two arrays; with `tolerance` by the absolute difference alone, whatever the case."""
    a, b = np.asarray(ours), np.asarray(recorded)
    if a.shape != b.shape:
        return Row(name, np.inf, np.inf, f"shape {a.shape}, recorded {b.shape}")
    if b.dtype.kind in "biu":
        differ = int(np.sum(a != b))
        return Row(name, float(differ), 0.0, f"{differ} numbers differ" if differ else "ok")
    a, b = a.astype(np.float64), b.astype(np.float64)
    if not np.isfinite(a).all():
        return Row(name, np.inf, np.inf, "not finite")
    absolute, largest = float(np.abs(a - b).max(initial=0)), float(np.abs(b).max(initial=0))
    relative = absolute / largest if largest else (0.0 if absolute == 0 else np.inf)
    if tolerance is not None:
        good = absolute <= tolerance
    elif name.startswith("grad"):
        good = relative <= (GRADIENT if exact else BFLOAT16)
    else:
        most = max(ABSOLUTE, KEYS * largest) if name.startswith("kv_cache/") else ABSOLUTE
        good = absolute <= most if exact else relative <= BFLOAT16
    return Row(name, absolute, relative, "ok" if good else "DIFFERS")


def joint(model: Pi0, params: Params, prefix: Any, suffix: Any, mask: jax.Array, positions: jax.Array) -> Any:
    """Outputs of both experts in one pass over all tokens, made of the model's own layers: [B, S, D] and [B, T, W].

    Acting and training never run it: they read the prefix once. It shows that both ways are the same, and gives the
    recorded numbers of masked tokens.
    """
    config, llm = model.config, params["PaliGemma"]["llm"]
    count, turned = prefix.shape[1], gemma.rotation(positions, config.head_dim)
    cond = None if suffix.cond is None else suffix.cond[:, 0]

    def layer(carry: tuple[jax.Array, jax.Array], leaf: tuple[Params, Params]) -> tuple[Any, None]:
        xs, sources, queries, gates = carry, [], [], []
        for x, own, end, part in zip(xs, leaf, (VLM, EXPERT), (slice(count), slice(count, None)), strict=True):
            here = tuple(x[:, part] for x in turned)
            q, k, v, gate = gemma.attention_inputs(config, own, end, x, here, cond if end == EXPERT else None)
            queries.append(q[:, None])
            gates.append(gate)
            sources.append(gemma.Source(k, v, mask[:, None, :, part]))
        out = []
        for i, (x, own, end) in enumerate(zip(xs, leaf, (VLM, EXPERT), strict=True)):
            rows = slice(count) if end == VLM else slice(count, None)
            seen = [s._replace(mask=s.mask[:, :, rows]) for s in sources]
            encoded = gemma.attend(queries[i], seen)[:, 0]
            out.append(gemma.layer_output(config, own, end, x, encoded, gates[i], cond if end == EXPERT else None))
        return tuple(out), None

    stacked = tuple(gemma.layers_of(llm["layers"], end) for end in (VLM, EXPERT))
    start = (prefix.astype(config.dtype), suffix.tokens[:, 0].astype(config.dtype))
    (before, after), _ = jax.lax.scan(layer, start, stacked)
    return gemma.last_norm(llm, VLM, before), gemma.last_norm(llm, EXPERT, after, cond)


def forward(model: Pi0, params: Params, observation: Any, x: jax.Array, t: jax.Array) -> dict[str, Any]:
    """Everything that is recorded of a forward pass, under the recorded names."""
    config, out = model.config, {}
    for camera in config.cameras:
        stages = siglip.stages(config, params["PaliGemma"]["img"], observation[IMAGE_PREFIX + camera])
        out[f"siglip/{camera}"] = stages.tokens
        if camera == config.cameras[0]:
            out |= {f"siglip/{name}": getattr(stages, name) for name in ("stem", "with_posemb", "encoded")}
    tokens, real = model.prefix_tokens(params, observation)
    prefix = model.encode(params, observation)
    suffix = model.suffix(params, prefix.state, x[:, None], t[:, None])
    valid = jnp.concatenate([real, jnp.ones(suffix.tokens.shape[:1] + suffix.tokens.shape[2:3], bool)], axis=1)
    opens = jnp.concatenate([jnp.zeros(real.shape[1], bool), suffix.opens])
    mask, positions = masks.attention_mask(valid, opens), masks.positions(valid)
    before, after = joint(model, params, tokens, suffix, mask, positions)
    shared = model.suffix_output(params, prefix, suffix)[:, 0]
    out |= {
        "prefix_tokens": tokens, "prefix_mask": real, "prefix_ar": opens[: real.shape[1]],
        "suffix_tokens": suffix.tokens[:, 0], "suffix_mask": valid[:, real.shape[1] :], "suffix_ar": suffix.opens,
        "posemb": time_features(t, config.expert.width), "attn_mask": mask, "positions": positions,
        "prefix_out": before, "suffix_out": shared, "suffix_out (joint pass)": after,
        "v_t": model.velocity(params, prefix, x, t),
        "v_t (joint pass)": linear(params["action_out_proj"], after[:, -x.shape[1] :]),
        "kv_cache/k": prefix.keys, "kv_cache/v": prefix.values,
    }  # fmt: skip
    if suffix.cond is not None:
        out["adarms_cond"] = suffix.cond[:, 0, 0]
    return out


class Comparison:
    """All comparisons of one case; `rows` is complete after `run`."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, Pi0(case.config)
        self.rows: list[Row] = []
        self._done: set[str] = set()

    def run(self) -> None:
        case, inputs = self.case, self.case.inputs
        found = case.params()
        self._parameters(found)
        params, observation = nested({k: jnp.asarray(v) for k, v in found.items()}), case.observation()
        x, u = interpolate(*(jnp.asarray(inputs[k]) for k in ("noise", "time", "actions")))
        for name, ours in (("x_t", x), ("u_t", u)):
            if name in inputs:
                self.rows.append(compared(f"inputs: {name}", ours, inputs[name], exact=True))
        for name, ours in self._forward(params, observation).items():
            self.check(name.removesuffix(" (joint pass)"), ours, shown=name)
        self._losses(params, observation)
        self._samples(params, observation)
        if not case.outputs:
            self.rows.append(Row("outputs.npz", np.nan, np.nan, "NOT COMPARED: it holds no array"))
        for name in case.outputs:
            if name not in self._done:
                self.rows.append(Row(name, np.nan, np.nan, "NOT COMPARED: this array is not known here"))

    def check(self, name: str, ours: Any, *, shown: str = "", tolerance: float | None = None) -> None:
        """Compare with what is recorded under `name`, if it is."""
        if name in self.case.outputs:
            row = compared(name, ours, self.case.outputs[name], exact=self.case.exact, tolerance=tolerance)
            self.rows.append(row._replace(name=shown or name))
            self._done.add(name)

    def _parameters(self, params: dict[str, np.ndarray]) -> None:
        """Compare the list of parameters, and all checkpoints, with those that are used."""
        case, listed = self.case, self.case.listed()
        if listed:
            ours = {path: f"{array.shape} {array.dtype}" for path, array in params.items()}
            wrong = sorted(path for path in {*ours, *listed} if ours.get(path) != listed.get(path))
            verdict = f"DIFFERS: {wrong[0]}, and {len(wrong) - 1} more" if wrong else "ok"
            self.rows.append(Row(f"params.txt ({len(listed)} parameters)", float(len(wrong)), 0.0, verdict))
        for folder in case.checkpoints:
            found = flat(Checkpoint(folder).load(case.config))
            differ = [
                path for path in params if not np.array_equal(found[path], params[path].astype(found[path].dtype))
            ]
            verdict = f"DIFFERS: {differ[0]}, and {len(differ) - 1} more" if differ else "ok"
            name = f"checkpoint {folder.relative_to(case.folder)}"
            self.rows.append(Row(name, float(len(differ)), 0.0, verdict))
        if case.checkpoints and (
            wrong := [k for k, v in params.items() if not np.array_equal(v, rule_leaf(k, v.shape))]
        ):
            self.rows.append(Row("parameters by rule", float(len(wrong)), 0.0, f"ok: {len(wrong)} follow none"))

    def _forward(self, params: Params, observation: Any) -> dict[str, Any]:
        x, t = (jnp.asarray(self.case.inputs[k]) for k in ("x_t", "time"))
        run = jax.jit(lambda p, o, x, t: forward(self.model, p, o, x, t))
        return run(params, observation, x, t)

    def _losses(self, params: Params, observation: Any) -> None:
        case = self.case
        actions, noise, t = (jnp.asarray(case.inputs[k]) for k in ("actions", "noise", "time"))

        def loss(params: Params, observation: Any) -> tuple[jax.Array, jax.Array]:
            prefix = self.model.encode(params, observation)
            errors = self.model.flow_errors(params, prefix, actions, noise[:, None], t[:, None])[:, 0]
            ones = jnp.ones(actions.shape[:2])
            total = self.model.flow_loss(params, prefix, actions, ones, None, noise[:, None], t[:, None])
            return total.mean(), jnp.mean(errors, axis=-1)

        gradients, per_step = jax.jit(jax.grad(loss, has_aux=True))(params, observation)
        self.check("loss", per_step)
        self.check("loss_check", per_step)
        images = {k.removeprefix(AUGMENTED): v for k, v in case.outputs.items() if k.startswith(AUGMENTED)}
        if images and "loss_train_aug" in case.outputs:
            self.check("loss_train_aug", jax.jit(loss)(params, case.observation(images))[1])
            for camera in images:
                self.rows.append(Row(AUGMENTED + camera, 0.0, 0.0, "ok: the input of loss_train_aug"))
                self._done.add(AUGMENTED + camera)
        self._gradients(flat(gradients))

    def _gradients(self, gradients: dict[str, jax.Array]) -> None:
        norms = {path: float(jnp.linalg.norm(g.astype(jnp.float32).ravel())) for path, g in gradients.items()}
        tolerance = GRADIENT if self.case.exact else BFLOAT16
        for path, gradient in gradients.items():
            limit = None
            if path.endswith(ROUNDING):
                module = path.removesuffix("key/bias")
                limit = tolerance * max(norm for other, norm in norms.items() if other.startswith(module))
            self.check(f"grad_norm/{path}", np.float32(norms[path]), tolerance=limit)
            self.check(f"grad/{path}", gradient, tolerance=limit)

    def _samples(self, params: Params, observation: Any) -> None:
        noise = self.case.inputs.get("sample_noise")
        prefix = jax.jit(self.model.encode)(params, observation)
        for name in [k for k in self.case.outputs if k.startswith("sample_actions")]:
            steps = int(name.rpartition("/")[2]) if "/" in name else int(self.case.inputs["num_steps"])
            sample = jax.jit(lambda p, f, z, steps=steps: self.model.sample(p, f, z, None, steps))
            if noise is not None:
                self.check(name, sample(params, prefix, jnp.asarray(noise)[:, None])[:, 0])


def cases(folders: list[Path]) -> Iterator[Path]:
    """Iterate over the cases: each folder that is one, or those within it."""
    for folder in folders:
        within = sorted(file.parent for file in folder.rglob("meta.json"))
        yield from within or [folder]


def compare(folder: Path) -> Comparison | str:
    """Compare one case; a string says why it could not be run."""
    try:
        comparison = Comparison(Case(folder))
        comparison.run()
    except DataError as error:
        return str(error)
    except Exception as error:  # whatever is wrong with one case, the others are compared
        return f"{type(error).__name__}: {error}"
    return comparison


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    jax.config.update("jax_default_matmul_precision", "highest")  # accelerators multiply coarser by default
    # jaxlib's fused products on a CPU round more: they double a deep model's distance from float64. Read by the first
    # computation.
    os.environ["XLA_FLAGS"] = f"--xla_cpu_experimental_ynn_fusion_type= {os.environ.get('XLA_FLAGS', '')}"
    good = True
    for folder in cases(parser.parse_args().folders):
        result = compare(folder)
        if isinstance(result, str):
            print(f"{folder}: cannot be run: {result}")
            good = False
            continue
        print(f"{folder}: {result.case.config.dtype}, {len(result.rows)} comparisons")
        print(f"  {'array':100} {'largest absolute':>16} {'relative':>9}  verdict")
        for row in result.rows:
            good = good and row.good
            print(f"  {row.name:100} {row.absolute:16.2e} {row.relative:9.1e}  {row.verdict}")
    print("all agree" if good else "NOT ALL AGREE")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
