"""Checkpoints that any layout can restore, verified on the way in and out."""

from jaxpar.checkpoint.compat import config_changes, config_differences, make_meta
from jaxpar.checkpoint.errors import CheckpointError
from jaxpar.checkpoint.store import CheckpointStore

__all__ = ["CheckpointError", "CheckpointStore", "config_changes", "config_differences", "make_meta"]
