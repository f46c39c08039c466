"""Trains a classifier: balanced batches, augmentation, early stopping on held-out episodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from serl_chunk.classifier import model
from serl_chunk.classifier.dataset import Labelled, LabelledEpisode, camera_specs, frames_by_class
from serl_chunk.classifier.files import Description
from serl_chunk.classifier.metrics import Evaluation, evaluate
from serl_chunk.classifier.model import SMALL, ClassifierNetwork, Predictor
from serl_chunk.config.agents.encoder import EncoderConfig
from serl_chunk.config.fields import require
from serl_chunk.models.encoder import random_shift
from serl_chunk.types import IMAGE_PREFIX, STATE

OFTEN = 10  # times as often as others a frame is drawn that an operator corrected
BLOCK = 64  # frames of one call where many are classified
Progress = Callable[[int, int, str], None]  # done, total, note


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """Settings of the training; ConfigError for a value that cannot work."""

    steps: int = 2000  # at most so many updates
    batch_size: int = 64  # frames of an update, the same number of each class
    learning_rate: float = 1e-4  # Adam's, HIL-SERL's
    shift: int = 4  # augmentation, pixels by which all cameras of a frame are shifted alike; HIL-SERL's
    brightness: float = 0.25  # augmentation, largest relative change of a frame
    colour: float = 0.1  # and of each channel
    evaluate_every: int = 100  # updates between two looks at the held-out episodes
    patience: int = 8  # looks without a better loss after which training ends; the best parameters are kept
    seed: int = 42  # of the parameters, the batches and the augmentation

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "evaluate_every", "patience"):
            require(getattr(self, name) >= 1, name, f"must be at least 1, got {getattr(self, name)}")
        require(0 < self.learning_rate < 1, "learning_rate", f"must lie in (0, 1), got {self.learning_rate:g}")
        require(self.shift >= 0, "shift", f"must be at least 0, got {self.shift}")
        for name in ("brightness", "colour"):
            value = getattr(self, name)
            require(0 <= value < 1, name, f"must lie in [0, 1), got {value:g}")


class Trained(NamedTuple):
    """The best parameters by the loss on held-out episodes."""

    description: Description  # without threshold, figures and digest
    weights: dict[str, np.ndarray]
    step: int  # update after which they were the best
    steps: int  # updates in all
    loss: float  # on the held-out episodes, each class counting alike


def augment(key: jax.Array, images: dict[str, jax.Array], options: TrainingOptions) -> dict[str, jax.Array]:
    """Shift the frames uint8[B, H, W, 3] of a sample alike, and change the light and colour of each: float32."""
    batch = len(next(iter(images.values())))
    k_shift, key = jax.random.split(key)
    if options.shift:
        seen = {IMAGE_PREFIX + name: image for name, image in images.items()} | {STATE: jnp.zeros((batch, 1))}
        shifted = random_shift(k_shift, seen, options.shift)
        images = {name: shifted[IMAGE_PREFIX + name] for name in images}
    out = {}
    for number, (name, image) in enumerate(sorted(images.items())):
        k_light, k_colour = jax.random.split(jax.random.fold_in(key, number))
        light = jax.random.uniform(k_light, (batch, 1, 1, 1), minval=-options.brightness, maxval=options.brightness)
        colour = jax.random.uniform(k_colour, (batch, 1, 1, 3), minval=-options.colour, maxval=options.colour)
        out[name] = jnp.clip(image.astype(jnp.float32) * (1 + light) * (1 + colour), 0.0, 255.0)
    return out


class BalancedBatches:
    """Draws frames, the same number of each class, with replacement; those that an operator corrected more often."""

    def __init__(self, data: Labelled, cameras: Sequence[str], batch_size: int, seed: int) -> None:
        self._episodes, self._cameras = data.episodes, cameras
        first = [len(e.labels) - e.corrected for e in data.episodes]
        self._rows = [
            np.array([row for row in rows for _ in range(OFTEN if row[1] >= first[row[0]] else 1)])
            for rows in frames_by_class(data)
        ]
        self._each = max(1, batch_size // len(self._rows))
        self._rng = np.random.default_rng(seed)

    def draw(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return uint8[B, H, W, 3] of each camera, and int32[B] classes."""
        drawn = [rows[self._rng.integers(len(rows), size=self._each)] for rows in self._rows]
        places = np.concatenate(drawn).tolist()
        images = {c: np.stack([self._episodes[e].images[c][i] for e, i in places]) for c in self._cameras}
        return images, np.repeat(np.arange(len(self._rows), dtype=np.int32), self._each)


def in_blocks(
    logits: Callable[[dict[str, np.ndarray]], Any], episodes: Sequence[LabelledEpisode], cameras: Sequence[str]
) -> list[np.ndarray]:
    """Return what `logits` gives, [B, N] for blocks of one size, for the frames of each episode: [frames, N]."""
    out = []
    for episode in episodes:
        parts = []
        for start in range(0, len(episode.labels), BLOCK):
            block = {c: episode.images[c][start : start + BLOCK] for c in cameras}
            n = len(block[cameras[0]])
            filled = {c: np.concatenate([v, np.zeros((BLOCK - n, *v.shape[1:]), np.uint8)]) for c, v in block.items()}
            parts.append(np.asarray(logits(filled))[:n])
        out.append(np.concatenate(parts))
    return out


def train(
    training: Labelled, validation: Labelled, cameras: Sequence[str], *, encoder: EncoderConfig = SMALL,
    weights: str = "", options: TrainingOptions | None = None, progress: Progress = lambda done, total, note: None,
) -> Trained:  # fmt: skip
    """Train on the frames of `training`, and stop by those of `validation`.

    Args:
        cameras: whose frames are looked at.
        weights: file of a pretrained ResNet-10 (`serl-chunk data encoder`); empty for none.
        progress: called at each look at the held-out episodes.

    Raises:
        ConfigError: a class has no frame, or the file of weights does not fit.
        DataError: the frames have different sizes.
    """
    options = options or TrainingOptions()
    specs = camera_specs([*training.episodes, *validation.episodes], cameras)
    net = model.network(specs, encoder, len(training.classes))
    params = model.initial(net, specs, options.seed, weights)
    batches = BalancedBatches(training, cameras, options.batch_size, options.seed)
    optimiser = optax.adam(options.learning_rate)
    update = jax.jit(partial(_update, net, optimiser, options), donate_argnums=(0, 1))
    forward = jax.jit(lambda params, images: net.apply({"params": params}, images))
    state, key = optimiser.init(params), jax.random.key(options.seed)
    best: Trained | None = None
    kept = Description(specs, training.classes, 0.5, 1, encoder)
    for step in range(1, options.steps + 1):
        params, state, train_loss = update(params, state, jax.random.fold_in(key, step), *batches.draw())
        if step % options.evaluate_every and step != options.steps:
            continue
        loss = _loss(in_blocks(partial(forward, params), validation.episodes, cameras), validation)
        if best is None or loss < best.loss:
            best = Trained(kept, model.flat_arrays(params), step, step, loss)
        best = best._replace(steps=step)
        progress(step, options.steps, f"training loss {float(train_loss):.4f}, held-out loss {loss:.4f}")
        if step - best.step >= options.patience * options.evaluate_every:
            break
    assert best is not None
    return best


def _update(
    net: ClassifierNetwork, optimiser: Any, options: TrainingOptions, params: Any, state: Any, key: jax.Array,
    images: dict[str, jax.Array], labels: jax.Array,
) -> tuple[Any, Any, jax.Array]:  # fmt: skip
    k_augment, k_dropout = jax.random.split(key)
    seen = augment(k_augment, images, options)

    def loss_of(params: Any) -> jax.Array:
        logits: Any = net.apply({"params": params}, seen, train=True, rngs={"dropout": k_dropout})
        if logits.shape[-1] == 1:  # of two classes
            return optax.sigmoid_binary_cross_entropy(logits[:, 0], labels.astype(jnp.float32)).mean()
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradient = jax.value_and_grad(loss_of)(params)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to the power of an integer count
        updates, state = optimiser.update(gradient, state)
    return optax.apply_updates(params, updates), state, loss


def _loss(logits: Sequence[np.ndarray], data: Labelled) -> float:
    """The mean of the classes' mean losses, of those that the data have."""
    p = model.probabilities(np.concatenate(list(logits)))
    labels = np.concatenate([e.labels for e in data.episodes])
    losses = [-np.log(np.maximum(p[labels == c, c], 1e-12)).mean() for c in range(p.shape[1]) if (labels == c).any()]
    return float(np.mean(losses))


def judge(
    description: Description, weights: dict[str, np.ndarray], data: Labelled, *, threshold: float | None = None,
    false_positives: float = 0.01,
) -> Evaluation:  # fmt: skip
    """Classify all frames of `data` and compute the figures, as `metrics.evaluate` does."""
    predictor = Predictor(description, weights)
    cameras = [c.name for c in description.cameras]
    success = [p[:, -1] for p in in_blocks(predictor, data.episodes, cameras)]
    return evaluate(
        data.episodes, success, description.frames, data.success_class,
        threshold=threshold, false_positives=false_positives,
    )  # fmt: skip
