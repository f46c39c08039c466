"""Frames of a MuJoCo model on request, without a window."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any

import numpy as np

from serl_chunk.extras import OPENGL_HINT
from serl_chunk.robots.base import SimulatedEnv
from serl_chunk.types import ConfigError


class MujocoCamera:
    """Renders a model's cameras as squares of `size` pixels, unless `shadows` without shadows, reflections and
    multisampling (90 % of a frame's time).

    Nothing is opened before the first frame. All calls must come from one thread, because an OpenGL context belongs to
    one. Geoms of the groups `hidden` are not shown.
    """

    def __init__(
        self, mujoco: Any, model: Any, size: int, hidden: Sequence[int] = (), *, shadows: bool = False
    ) -> None:
        self._mujoco, self.model, self._size, self._shadows = mujoco, model, size, shadows
        self._shown = mujoco.MjvOption()
        self._shown.geomgroup[list(hidden)] = 0
        if not shadows:
            model.vis.quality.offsamples = 0
            model.vis.quality.shadowsize = 0
        model.vis.global_.offwidth = max(size, model.vis.global_.offwidth)
        model.vis.global_.offheight = max(size, model.vis.global_.offheight)
        self._renderer: Any = None

    def frame(self, data: Any, name: str) -> np.ndarray:
        """Render camera `name`, `uint8[size, size, 3]`; raise ConfigError if no OpenGL context can be made."""
        renderer = self._renderer or self._open()
        renderer.update_scene(data, name, self._shown)
        return renderer.render()

    def close(self) -> None:
        if self._renderer is not None:
            atexit.unregister(self._renderer.close)
            self._renderer.close()
            self._renderer = None

    def _open(self) -> Any:
        try:
            renderer = self._mujoco.Renderer(self.model, self._size, self._size)
        except Exception as error:  # MuJoCo, PyOpenGL, EGL and GLFW each raise their own kind here
            raise ConfigError(f"MuJoCo cannot create an OpenGL context ({error}): {OPENGL_HINT}") from error
        for flag in (self._mujoco.mjtRndFlag.mjRND_SHADOW, self._mujoco.mjtRndFlag.mjRND_REFLECTION):
            renderer.scene.flags[flag] = self._shadows
        # At exit, MuJoCo destroys the display before this object. Hooks run in reverse order: this one is in time.
        atexit.register(renderer.close)
        self._renderer = renderer
        return renderer


class MujocoEnv(SimulatedEnv):
    """A simulation in MuJoCo. Geoms of the groups `hidden` are not shown, and no shadows unless `shadows`.

    Nothing is rendered before `read_images` is called, from one thread. It raises ConfigError without an OpenGL
    context.
    """

    hidden: Sequence[int] = ()
    shadows = False
    _camera: MujocoCamera | None = None

    def close(self) -> None:
        if self._camera is not None:
            self._camera.close()
            self._camera = None

    def _frame(self, camera: str) -> np.ndarray:
        mujoco, model, data = self._scene()
        if self._camera is None:
            size = self.robot_spec.camera(camera).height
            self._camera = MujocoCamera(mujoco, model, size, self.hidden, shadows=self.shadows)
        return self._camera.frame(data, camera)

    def _scene(self) -> tuple[Any, Any, Any]:
        """Return the module mujoco, the model and its data."""
        raise NotImplementedError
