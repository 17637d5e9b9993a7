"""Messages between a program and an engine on one connection: a head of JSON and arrays of numbers.

A message is the length of the rest and the length of the head, 4 bytes each, the head, and the bytes of the arrays, of
which ``arrays`` of the head has type codes and lengths.
"""

from __future__ import annotations

import asyncio
import json
import struct
from array import array
from typing import Any

_LENGTHS = struct.Struct("<II")
MAX_BYTES = 1 << 30


def packed(head: dict[str, Any], *arrays: array[Any]) -> bytes:
    """Return a message, ready to be written."""
    text = json.dumps({**head, "arrays": [(part.typecode, len(part)) for part in arrays]}).encode()
    parts = [part.tobytes() for part in arrays]
    return b"".join((_LENGTHS.pack(4 + len(text) + sum(map(len, parts)), len(text)), text, *parts))


async def read_message(reader: asyncio.StreamReader) -> tuple[dict[str, Any], list[array[Any]]]:
    """Return the head and the arrays of the next message.

    Raises:
        EOFError: the connection has ended, or what arrives is no message.
    """
    try:
        length, of_head = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
        if not 4 <= of_head + 4 <= length <= MAX_BYTES:
            raise EOFError("the other side does not send messages")
        content = await reader.readexactly(length - 4)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise EOFError("the connection has ended") from error
    head: dict[str, Any] = json.loads(content[:of_head])
    arrays, start = [], of_head
    for code, count in head.pop("arrays"):
        part: array[Any] = array(code)
        stop = start + count * part.itemsize
        part.frombytes(content[start:stop])
        arrays.append(part)
        start = stop
    return head, arrays
