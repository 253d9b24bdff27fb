"""Layout -> device mesh, `tensor` innermost and host-aware."""

import os
import warnings
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxpar.config.axes import AXES
from jaxpar.config.layout import Layout

Device = Any  # jax.Device, which type checkers see as a variable


def prepare_fake_devices(num_devices: int) -> None:
    """Ask for CPU devices; call before JAX makes its client.

    XLA:CPU runs each device's program on a pool of max(cores, devices) threads, and two executions in flight need twice
    as many: with NPROC at 2 x devices 12 of 12 runs were clean, without it 3 of 3 hung.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={num_devices}".strip()
    os.environ["NPROC"] = str(max(2 * num_devices, int(os.environ.get("NPROC", "0"))))


def build_mesh(layout: Layout, devices: list[Device] | None = None) -> Mesh:
    """A mesh of all six axes in the order of `config.axes.AXES`; the number of devices must be their product."""
    devices = jax.devices() if devices is None else devices
    shape = tuple(layout.sizes[axis] for axis in AXES)
    if layout.num_devices != len(devices):
        raise ValueError(f"mesh: axes multiply to {layout.num_devices}, but {len(devices)} devices are there")
    if devices[0].platform == "cpu":
        grid = np.array(devices).reshape(shape)
    else:
        from jax.experimental import mesh_utils

        grid = mesh_utils.create_device_mesh(shape, devices, contiguous_submeshes=False, allow_split_physical_axes=True)
    _warn_if_tensor_leaves_host(grid)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _warn_if_tensor_leaves_host(grid: np.ndarray) -> None:
    for group in grid.reshape(-1, grid.shape[-1]):
        hosts = {device.process_index for device in group}
        if len(hosts) > 1:
            warnings.warn(
                f"mesh.tensor={grid.shape[-1]} spans hosts {sorted(hosts)}: its collectives leave the fast links of a host; "
                f"a size that divides the devices of one host keeps them inside",
                stacklevel=2,
            )
            return
