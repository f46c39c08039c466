"""How the functions of agents are compiled, and arrays of files placed, where a learner may have several devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax

Place = Callable[[Any], jax.Array]  # puts an array of a file where it is to lie

# Without it XLA for CPUs copies each network once an update, because losses read what the update replaces.
_COMPILER_OPTIONS = {"xla_cpu_copy_insertion_use_region_analysis": True}


class Compile(Protocol):
    """Compiles a function for the devices that run it."""

    def __call__(
        self, function: Callable[..., Any], *, batch: int | None = None, axis: int = 0, updates: bool = False
    ) -> Callable[..., Any]:
        """Return it compiled.

        Args:
            batch: number of the argument that has rows, on `axis` of each array; all others are states, bases, keys.
                None: none has, and the result is a state, or a part of one.
            updates: whether the first argument is a state, which is donated, and the result an `Updated`.
        """


def compiled(
    function: Callable[..., Any], *, batch: int | None = None, axis: int = 0, updates: bool = False, **shardings: Any
) -> Callable[..., Any]:
    """Return `function` compiled, on one device unless arguments or `shardings`, those of `jax.jit`, have others."""
    if not updates:
        return jax.jit(function, **shardings)
    # Donated buffers go to outputs of their shape in order: dropping an unused one would shift and copy the rest.
    options = _COMPILER_OPTIONS if jax.default_backend() == "cpu" else None
    return jax.jit(function, donate_argnums=0, keep_unused=True, compiler_options=options, **shardings)
