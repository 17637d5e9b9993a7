"""The names of verl 0.4.1 that its tests of the protocol import, from mcontroller."""

from mcontroller import DataProto

__all__ = ["DataProto"]
