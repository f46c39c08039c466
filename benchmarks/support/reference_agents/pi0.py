"""pi0 and pi0.5 written plainly: one joint pass over all tokens, layer by layer, keys concatenated, nothing shared.

It reads sizes from a case's `meta.json` and parameters by their path, and has no line in common with models/pi0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Arrays = dict[str, Any]
HIGHEST = jax.lax.Precision.HIGHEST
IMG, LLM = "PaliGemma/img/", "PaliGemma/llm/"


class PlainPi0:
    """One model; `params` are `path -> array`, `meta` is that of a recorded case."""

    def __init__(self, meta: Mapping[str, Any], params: Arrays) -> None:
        self.meta, self.params, self.config = meta, params, meta["config"]
        self.dtype = jnp.dtype(self.config["dtype"])
        names = (self.config["paligemma_variant"], self.config["action_expert_variant"])
        self.experts = [meta["gemma"][name] for name in names]
        self.pi05 = bool(self.config["pi05"])

    # SigLIP

    def siglip(self, image: jax.Array) -> Arrays:
        s, p = self.meta["siglip"], self.params
        x = jax.lax.conv_general_dilated(
            image.astype(jnp.float32), p[IMG + "embedding/kernel"].astype(jnp.float32), (s["patch"],) * 2, "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"), precision=HIGHEST,
        )  # fmt: skip
        stem = x + p[IMG + "embedding/bias"].astype(jnp.float32)
        x = with_posemb = stem.reshape(len(stem), -1, stem.shape[-1]) + p[IMG + "pos_embedding"].astype(jnp.float32)
        x = x.astype(self.dtype)
        for i in range(s["depth"]):
            block = {k: p[IMG + "Transformer/encoderblock/" + k][i] for k in self._below("Transformer/encoderblock/")}
            a = "MultiHeadDotProductAttention_0/"
            y = self._layer_norm(x, block["LayerNorm_0/scale"], block["LayerNorm_0/bias"])
            q, k, v = (
                jnp.tensordot(y, block[f"{a}{n}/kernel"].astype(y.dtype), 1) + block[f"{a}{n}/bias"].astype(y.dtype)
                for n in ("query", "key", "value")
            )
            q = q / jnp.sqrt(jnp.asarray(q.shape[-1])).astype(q.dtype)
            weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
            y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
            y = jnp.tensordot(y, block[f"{a}out/kernel"].astype(y.dtype), 2) + block[f"{a}out/bias"].astype(y.dtype)
            x = x + y
            y = self._layer_norm(x, block["LayerNorm_1/scale"], block["LayerNorm_1/bias"])
            y = _affine(y, block["MlpBlock_0/Dense_0/kernel"], block["MlpBlock_0/Dense_0/bias"], y.dtype)
            y = jax.nn.gelu(y, approximate=True)
            x = x + _affine(y, block["MlpBlock_0/Dense_1/kernel"], block["MlpBlock_0/Dense_1/bias"], y.dtype)
        norm = IMG + "Transformer/encoder_norm/"
        encoded = self._layer_norm(x, p[norm + "scale"], p[norm + "bias"])
        tokens = _affine(encoded, p[IMG + "head/kernel"], p[IMG + "head/bias"], self.dtype)
        return {"stem": stem, "with_posemb": with_posemb, "encoded": encoded, "tokens": tokens}

    def _below(self, name: str) -> list[str]:
        return [k.removeprefix(IMG + name) for k in self.params if k.startswith(IMG + name)]

    @staticmethod
    def _layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = (wide - wide.mean(-1, keepdims=True)) / jnp.sqrt(wide.var(-1, keepdims=True) + 1e-6)
        return (wide * scale + bias).astype(x.dtype)

    # Tokens

    def prefix(self, obs: Arrays) -> tuple[jax.Array, jax.Array, np.ndarray]:
        """Tokens [B, S, D], which are real bool[B, S], and `ar` bool[S]."""
        tokens, mask = [], []
        for name, image in obs["image"].items():
            tokens.append(self.siglip(image)["tokens"])
            mask.append(jnp.repeat(obs["image_mask"][name][:, None], tokens[-1].shape[1], axis=1))
        if "tokenized_prompt" in obs:
            table = self.params[LLM + "embedder/input_embedding"]
            text = jnp.take(table, obs["tokenized_prompt"], axis=0) * jnp.sqrt(table.shape[-1]).astype(table.dtype)
            tokens.append(text.astype(self.dtype))
            mask.append(obs["tokenized_prompt_mask"])
        real = jnp.concatenate(mask, 1)
        return jnp.concatenate(tokens, 1), real, np.zeros(real.shape[1], bool)

    def posemb(self, t: jax.Array) -> jax.Array:
        width = self.experts[1]["width"]
        period = 4e-3 * (4.0 / 4e-3) ** jnp.linspace(0.0, 1.0, width // 2)
        angle = jnp.einsum("i,j->ij", t, 1.0 / period * 2 * jnp.pi, precision=HIGHEST)
        return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)

    def suffix(self, obs: Arrays, x: jax.Array, t: jax.Array) -> tuple[jax.Array, np.ndarray, jax.Array | None]:
        """Tokens [B, T, W], `ar` bool[T], and the condition of adaptive norms [B, W]."""
        actions, time = self._linear("action_in_proj", x), self.posemb(t)
        first = np.arange(x.shape[1]) == 0
        if self.pi05:
            cond = jax.nn.silu(self._linear("time_mlp_in", time))
            return actions, first, jax.nn.silu(self._linear("time_mlp_out", cond))
        time = jnp.repeat(time[:, None], x.shape[1], 1)
        y = jax.nn.silu(self._linear("action_time_mlp_in", jnp.concatenate([actions, time], -1)))
        state = self._linear("state_proj", obs["state"])[:, None]
        tokens = jnp.concatenate([state, self._linear("action_time_mlp_out", y)], 1)
        return tokens, np.concatenate([[True], first]), None

    def _linear(self, name: str, x: jax.Array) -> jax.Array:
        kernel, bias = self.params[f"{name}/kernel"], self.params[f"{name}/bias"]
        return _affine(x, kernel, bias, jnp.result_type(x, kernel, bias))

    # Gemma

    def transformer(
        self,
        xs: list[jax.Array | None],
        mask: jax.Array,
        positions: jax.Array,
        cond: jax.Array | None = None,
        cache: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[list[jax.Array | None], tuple[jax.Array, jax.Array]]:
        """Outputs of both experts, and keys and values of all layers, [L, B, S, K, h], those of the cache first."""
        conds = [None, cond]
        xs = [None if x is None else x.astype(self.dtype) for x in xs]
        keys, values = [], []
        for i in range(self.experts[0]["depth"]):
            before = None if cache is None else (cache[0][i], cache[1][i])
            xs, (k, v) = self._block(i, xs, mask, positions, conds, before)
            keys.append(k)
            values.append(v)
        out = [None if x is None else self._norm("final_norm", e, None, x, conds[e])[0] for e, x in enumerate(xs)]
        return out, (jnp.stack(keys), jnp.stack(values))

    def _block(
        self, i: int, xs: list[Any], mask: jax.Array, positions: jax.Array, conds: list[Any], cache: Any
    ) -> tuple[list[Any], tuple[jax.Array, jax.Array]]:
        here, gates, qkv = [e for e, x in enumerate(xs) if x is not None], {}, []
        for e in here:
            y, gates[e] = self._norm("layers/pre_attention_norm", e, i, xs[e], conds[e])
            if f"{LLM}layers/attn/qkv_einsum{_end(e)}/w" in self.params:
                qkv.append(tuple(self._einsum("BSD,3KDH->3BSKH", "qkv_einsum", e, i, y)))
            else:
                q = self._einsum("BTD,NDH->BTNH", "q_einsum", e, i, y)
                qkv.append((q, *self._einsum("BSD,2KDH->2BSKH", "kv_einsum", e, i, y)))
        q, k, v = (jnp.concatenate(parts, 1) for parts in zip(*qkv, strict=True))
        q = _rope(q, positions) * self.experts[0]["head_dim"] ** -0.5
        k = _rope(k, positions)
        if cache is not None:
            k, v = jnp.concatenate([cache[0], k], 1), jnp.concatenate([cache[1], v], 1)
        groups = q.shape[2] // k.shape[2]
        logits = jnp.einsum(
            "bthd,bshd->bhts", q, jnp.repeat(k, groups, 2), preferred_element_type=jnp.promote_types(q.dtype, "float32")
        )
        logits = jnp.where(mask[:, None], logits, -2.3819763e38)
        encoded = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits).astype(q.dtype), jnp.repeat(v, groups, 2))
        out, start = list(xs), 0
        for e in here:
            end = start + xs[e].shape[1]
            y = self._einsum("BTNH,NHD->BTD", "attn_vec_einsum", e, i, encoded[:, start:end])
            start, x = end, _residual(xs[e], y, gates[e])
            y, gate = self._norm("layers/pre_ffw_norm", e, i, x, conds[e])
            gated = jax.nn.gelu(self._dot("gating_einsum", e, (i, 0), y)) * self._dot("gating_einsum", e, (i, 1), y)
            out[e] = _residual(x, self._dot("linear", e, (i,), gated), gate)
        return out, (k, v)

    def _norm(self, name: str, e: int, i: int | None, x: jax.Array, cond: jax.Array | None) -> tuple[jax.Array, Any]:
        leaf = lambda rest: self.params[f"{LLM}{name}{_end(e)}/{rest}"][... if i is None else i]  # noqa: E731
        wide = x.astype(jnp.promote_types(x.dtype, "float32"))
        normed = wide / jnp.sqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
        if cond is None:
            return (normed * (1 + leaf("scale"))).astype(x.dtype), None
        made = _affine(cond, leaf("Dense_0/kernel"), leaf("Dense_0/bias"), x.dtype)[:, None]
        scale, shift, gate = jnp.split(made, 3, -1)
        return (normed * (1 + scale) + shift).astype(x.dtype), gate

    def _einsum(self, equation: str, name: str, e: int, i: int, x: jax.Array) -> jax.Array:
        path = f"{LLM}layers/attn/{name}{_end(e)}/"
        out = jnp.einsum(equation, x, self.params[path + "w"][i].astype(x.dtype))
        if path + "lora_a" not in self.params:
            return out
        found = re.match("(.*),(.*)->(.*)", equation)
        assert found
        left, right, result = found.groups()
        before, after = right[-2], right[-1]
        a = f"{left},{right.replace(after, 'L')}->{result.replace(after, 'L')}"
        b = f"{result.replace(after, 'L')},{right.replace(before, 'L')}->{result}"
        low = jnp.einsum(a, x, self.params[path + "lora_a"][i].astype(x.dtype))
        lora = self.experts[e]["lora"]["attn"]
        return out + jnp.einsum(b, low, self.params[path + "lora_b"][i].astype(x.dtype)) * (
            lora["alpha"] / lora["rank"]
        )

    def _dot(self, name: str, e: int, i: tuple[int, ...], x: jax.Array) -> jax.Array:
        path = f"{LLM}layers/mlp{_end(e)}/{name}"
        out = x @ self.params[path][i].astype(x.dtype)
        if path + "_lora_a" not in self.params:
            return out
        a, b = (self.params[f"{path}_lora_{part}"][i].astype(x.dtype) for part in "ab")
        return out + x @ a @ b

    # What is recorded

    def joint(self, obs: Arrays, x: jax.Array, t: jax.Array) -> Arrays:
        """One pass over all tokens: everything that a case records of it."""
        prefix, real, opens = self.prefix(obs)
        suffix, more, cond = self.suffix(obs, x, t)
        valid = jnp.concatenate([real, jnp.ones(suffix.shape[:2], bool)], 1)
        mask = _mask(valid, np.concatenate([opens, more]))
        positions = jnp.cumsum(valid, 1) - 1
        (before, after), _ = self.transformer([prefix, suffix], mask, positions, cond)
        v = self._linear("action_out_proj", after[:, -x.shape[1] :])
        out = {
            "prefix_tokens": prefix, "prefix_mask": real, "prefix_ar": opens, "suffix_tokens": suffix,
            "suffix_mask": np.ones(suffix.shape[:2], bool), "suffix_ar": more, "posemb": self.posemb(t),
            "attn_mask": mask, "positions": positions, "prefix_out": before, "suffix_out": after, "v_t": v,
        }  # fmt: skip
        return out if cond is None else out | {"adarms_cond": cond}

    def loss(self, obs: Arrays, actions: jax.Array, noise: jax.Array, t: jax.Array) -> jax.Array:
        """The loss of every action, float32[B, H]."""
        x = t[:, None, None] * noise + (1 - t[:, None, None]) * actions
        return jnp.mean((self.joint(obs, x, t)["v_t"] - (noise - actions)) ** 2, -1)

    def cache(self, obs: Arrays) -> tuple[jax.Array, jax.Array]:
        prefix, real, opens = self.prefix(obs)
        return self.transformer([prefix, None], _mask(real, opens), jnp.cumsum(real, 1) - 1)[1]

    def sample(self, obs: Arrays, noise: jax.Array, steps: int) -> jax.Array:
        """Chunks of one noise for each observation, [B, H, D]."""
        _, real, _ = self.prefix(obs)
        cache = self.cache(obs)
        x, t, dt = noise, jnp.float32(1.0), -1.0 / steps
        for _ in range(steps):
            suffix, opens, cond = self.suffix(obs, x, jnp.broadcast_to(t, len(x)))
            own = _mask(jnp.ones(suffix.shape[:2], bool), opens)
            mask = jnp.concatenate([jnp.repeat(real[:, None], suffix.shape[1], 1), own], -1)
            positions = real.sum(-1)[:, None] + jnp.arange(suffix.shape[1])
            (_, after), _ = self.transformer([None, suffix], mask, positions, cond, cache)
            x, t = x + dt * self._linear("action_out_proj", after[:, -x.shape[1] :]), t + dt
        return x


def _end(expert: int) -> str:
    return f"_{expert}" if expert else ""


def _affine(x: jax.Array, kernel: jax.Array, bias: jax.Array, dtype: Any) -> jax.Array:
    return x.astype(dtype) @ kernel.astype(dtype) + bias.astype(dtype)


def _residual(x: jax.Array, y: jax.Array, gate: jax.Array | None) -> jax.Array:
    return x + y if gate is None else x + y * gate


def _mask(valid: jax.Array, opens: np.ndarray) -> jax.Array:
    group = np.cumsum(opens)
    return (group[None] <= group[:, None])[None] & valid[:, None, :] & valid[:, :, None]


def _rope(x: jax.Array, positions: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angle = (positions[..., None] / 10_000.0 ** (jnp.arange(half, dtype=jnp.float32) / half))[:, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1
    ).astype(x.dtype)
