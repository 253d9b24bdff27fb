"""`mesh:` the sizes of the six axes."""

from pydantic import Field

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
    fake_devices: int = Field(default=0, ge=0)  # CPU devices to make where no accelerator is found; 0: none

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}
