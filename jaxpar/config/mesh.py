"""`mesh:` the sizes of the six axes."""

import math
from typing import Literal

from pydantic import NonNegativeInt

from jaxpar.config.axes import AXES
from jaxpar.config.base import Section


class MeshConfig(Section):
    """Axis sizes; one may be -1 and takes the devices that are left."""

    pipe: int = 1
    replica: int = 1
    data: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    # CPU devices to make where no accelerator is found. 0: none; auto: as many as the axes multiply to.
    fake_devices: NonNegativeInt | Literal["auto"] = 0

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def num_fake_devices(self) -> int:
        """How many CPU devices are asked for; an axis of -1 counts as 1 under `auto`."""
        return math.prod(max(size, 1) for size in self.sizes.values()) if self.fake_devices == "auto" else self.fake_devices
