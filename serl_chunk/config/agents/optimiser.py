"""What an optimiser is built of: Adam, and a rate of their own for encoders."""

from __future__ import annotations

from typing import NamedTuple


class Optimiser(NamedTuple):
    """Adam with decoupled weight decay (AdamW) of one network and of the encoders in it."""

    lr: float
    encoder_lr: float
    lr_warmup: int = 0  # gradient steps in which the rate rises to `lr`
    lr_cosine: int = 0  # gradient steps after which it has fallen to a tenth; 0: it stays
    weight_decay: float = 0.0
    grad_clip: float = 0.0  # norm of the network's gradient, encoders included; 0: any
    b2: float = 0.999  # decay of the average of squared gradients
