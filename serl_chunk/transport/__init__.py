"""Exactly-once, encrypted transport between learner and actors. Importing it lets the wire carry bfloat16."""

import ml_dtypes
import numpy as np

from serl_chunk_robot.wire.codec import register_dtype

register_dtype("bfloat16", np.dtype(ml_dtypes.bfloat16))
