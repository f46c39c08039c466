"""Optional simulators: each is imported in one function here, on use, with what to install in the error.

Every room may use these functions; none of the packages is needed to import this module.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import re
import sys
import warnings
from typing import Any

from serl_chunk.types import ConfigError, SerlChunkError

OPENGL_HINT = (
    "headless rendering needs MUJOCO_GL=egl (or unset) and, on Debian and Ubuntu, "
    "`apt install libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri`"
)
_OF_OPENGL = re.compile(
    r"OpenGL|libGL|EGL|GLX|[Gg][Ll][Ff][Ww]|OS[Mm]esa|GLContext|\b(egl|gl|glad)[A-Z]|MUJOCO_GL|DISPLAY"
)


def mujoco(user: str, extra: str) -> Any:
    """The module `mujoco`, which `user` needs; raises ConfigError naming the extra to install, or OpenGL's library."""
    return _simulator("mujoco", user, extra)


def ogbench(user: str) -> Any:
    """The package `ogbench`, which `user` needs; raises ConfigError as `mujoco` does."""
    package = _simulator("ogbench", user, "ogbench")
    _simulator("ogbench.relabel_utils", user, "ogbench")
    # OGBench builds its action space anew on every reset, and gymnasium remarks on its type each time it may.
    warnings.filterwarnings("ignore", message=".*Box (low|high)'s precision lowered")
    return package


def robosuite(user: str, extra: str = "robomimic") -> Any:
    """The package `robosuite`, which `user` needs; raises ConfigError as `mujoco` does."""
    logging.getLogger("robosuite_logs").addFilter(_is_error)  # it announces every file it reads, and one it misses
    return _simulator("robosuite", user, extra)


def libero(user: str) -> Any:
    """The package `libero.libero` with its benchmarks and environments, for `user`; raises ConfigError as `mujoco`
    does.
    """
    robosuite(user, "libero")
    for module in ("benchmark", "envs"):
        _simulator(f"libero.libero.{module}", user, "libero")
    return _simulator("libero.libero", user, "libero")


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _simulator(module: str, user: str, extra: str) -> Any:
    choose_opengl()
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise opengl_error(error, user) or ConfigError(
            f"{user} needs {module.partition('.')[0]}, which cannot be imported ({error}): "
            f"pip install 'serl-chunk[{extra}]'"
        ) from error
    except AttributeError as error:  # PyOpenGL's way of saying that the library behind MUJOCO_GL is missing
        raise ConfigError(
            f"MuJoCo cannot load MUJOCO_GL={os.environ.get('MUJOCO_GL', '')!r} ({error}): {OPENGL_HINT}"
        ) from error


def opengl_error(error: Exception, user: str) -> ConfigError | None:
    """Return the sentence for `error` where it is OpenGL's, raised while `user` was making or drawing its environment.

    MuJoCo, PyOpenGL, EGL, GLFW and dm_control each raise their own kind, down to AttributeError; all name what failed.
    """
    if isinstance(error, SerlChunkError) or not _OF_OPENGL.search(f"{type(error).__name__}: {error}"):
        return None
    chosen = os.environ.get("MUJOCO_GL")
    return ConfigError(
        f"{user} cannot render with OpenGL here ({type(error).__name__}: {error}), "
        f"{'without MUJOCO_GL' if chosen is None else f'with MUJOCO_GL={chosen!r}'}: {OPENGL_HINT}"
    )


def choose_opengl() -> None:
    """Set MUJOCO_GL on a headless machine, unless it is set; MuJoCo reads it at its first import."""
    headless = sys.platform.startswith("linux") and not os.environ.get("DISPLAY")
    if headless and "MUJOCO_GL" not in os.environ:
        # MuJoCo's EGL module fails that import where libEGL is missing, and states need no OpenGL: then import without
        # it, and leave the install hint to the code that renders.
        try:
            ctypes.CDLL("libEGL.so.1")
        except OSError:
            os.environ["MUJOCO_GL"] = "disabled"
        else:
            os.environ["MUJOCO_GL"] = "egl"
