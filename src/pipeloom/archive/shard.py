"""One file of tensors in the format of safetensors, which holds nothing but names, types, shapes and bytes.

Writing it through the library means a second copy of the model where memory is short, and reading the file
again for its checksum. The format is 8 bytes of length, a JSON header and the bytes, so it is written here, with
the checksum on the way; the library reads it (`pipeloom.checkpoint`), and so does everybody else's.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipeloom.archive.durable import MOST_JSON_BYTES, write_new
from pipeloom.errors import CheckpointError

DTYPES: Final = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "complex64": ("C64", 8),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""torch's name of a dtype → what the format calls it, and the bytes of one value."""
_NAME_OF_CODE: Final = {code: name for name, (code, _) in DTYPES.items()}
_METADATA: Final = "__metadata__"


@dataclass(frozen=True)
class Form:
    """What a tensor is like: ``float32[4, 2]``."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def num_bytes(self) -> int:
        """What its values take."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True)
class Header:
    """What a shard says of itself."""

    forms: dict[str, Form]
    metadata: dict[str, str]


def write_shard(
    path: Path, tensors: Mapping[str, tuple[Form, memoryview]], metadata: Mapping[str, str]
) -> tuple[int, str]:
    """Write a new shard; equal tensors make equal files.

    Returns:
        Its size in bytes, and its SHA-256.
    """
    # Wide types first, as the library orders them: then every tensor lies at a multiple of its own width.
    order = sorted(tensors, key=lambda name: (-DTYPES[tensors[name][0].dtype][1], name))
    header: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))}
    end = 0
    for name in order:
        form = tensors[name][0]
        start, end = end, end + form.num_bytes
        header[name] = {"dtype": DTYPES[form.dtype][0], "shape": form.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sha256 = write_new(path, [struct.pack("<Q", len(text)), text, *(tensors[name][1] for name in order)])
    return 8 + len(text) + end, sha256


_GIT_LFS = b"version "
"""How a pointer begins; as a length of a header it would be two million terabytes."""


def read_header(path: Path) -> Header:
    """Return what a shard says of itself; the bytes of its tensors are not read.

    Raises:
        CheckpointError: it is missing, or no file of that format: lengths, types, shapes and places must be such
            that the tensors fill the rest of the file without gap or overlap.
    """
    try:
        with path.open("rb") as file:
            num_bytes = path.stat().st_size
            start = file.read(8)
            if num_bytes < 8:
                raise ValueError(f"it has {num_bytes} bytes, and 8 of them would be the length of its header")
            if start == _GIT_LFS:
                raise ValueError("it is not the file, but where Git LFS would get it from: git lfs pull")
            (length,) = struct.unpack("<Q", start)
            if length > min(MOST_JSON_BYTES, num_bytes - 8):
                raise ValueError(f"its header would have {length} bytes")
            fields = json.loads(file.read(length))
        metadata = {str(key): str(value) for key, value in fields.pop(_METADATA, {}).items()}
        return Header(_forms(fields, num_bytes - 8 - length), metadata)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from None


def _forms(fields: dict[str, Any], num_bytes: int) -> dict[str, Form]:
    forms, end = {}, 0
    for name, field in sorted(fields.items(), key=lambda item: list(map(int, item[1]["data_offsets"]))):
        forms[name] = form = Form(_NAME_OF_CODE[field["dtype"]], tuple(int(size) for size in field["shape"]))
        start, stop = map(int, field["data_offsets"])
        if start != end or min(form.shape, default=0) < 0 or stop - start != form.num_bytes:
            raise ValueError(f"the place of {name!r} in it is not that of a {form}")
        end = stop
    if end != num_bytes:
        raise ValueError(f"its tensors have {end} bytes, the file has room for {num_bytes}")
    return forms
