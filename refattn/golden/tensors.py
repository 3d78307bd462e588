"""Named arrays as the bytes of a safetensors file and back: bfloat16 too, and nothing is believed that was not checked.

bfloat16 is held in float32 in memory, as everywhere on the host.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

from refattn.args import Axes, Each, Maybe, One, check, checked
from refattn.files import check_size, parse_json
from refattn.golden.storage_types import TYPES, round_to

KINDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "I64": "int64"}
"""The types of the format that are read and written -> their names here."""

READ = {**KINDS, "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"}
"""The same with those that are read alone: lengths and masks of libraries come in them."""


@checked(arrays=Each([None]), about=Maybe(Each(str)))
def encode(arrays: Mapping[str, tuple[str, NDArray[Any]]], about: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a file of arrays, each with the name of the type to store it in, which must hold it exactly.

    `about` is the metadata of the file. The same arguments give the same bytes.
    """
    # A specification has but the address of its bytes: `held` keeps them.
    held = {name: _held(name, dtype, x) for name, (dtype, x) in sorted(arrays.items())}
    specs = {
        name: TensorSpec(dtype=arrays[name][0], shape=x.shape, data_ptr=x.ctypes.data, data_len=x.nbytes)
        for name, x in held.items()
    }
    return bytes(serialize(specs, dict(about) if about else None))


def _held(name: str, dtype: str, x: NDArray[Any]) -> NDArray[Any]:
    """Return an array with the bytes of x in a type."""
    check(f"{name}: type", dtype, One(tuple(KINDS.values())))
    check(name, x, Axes("*", "any"))
    if dtype in TYPES and not np.array_equal(round_to(wide := x.astype(np.float64), dtype), wide, equal_nan=True):
        raise ValueError(f"{name}: got values that {dtype} does not hold, needs such that it does")
    if dtype == "bfloat16":
        return np.asarray(np.asarray(x, np.float32, order="C").view(np.uint32) >> np.uint32(16), "<u2")
    return np.asarray(x, np.dtype(dtype).newbyteorder("<"), order="C")


def decode(data: bytes) -> dict[str, tuple[str, NDArray[Any]]]:
    """Return the arrays of a file by name, each with the name of the type that it was stored in.

    Raises
    ------
    ValueError
        Where the bytes are no safetensors file, a header that lies about sizes or has a name twice included, or hold
        an unknown type.
    """
    try:
        found = deserialize(data)
    except SafetensorError as error:
        raise ValueError(f"no safetensors file: {error}") from error
    return {name: _unpacked(name, entry) for name, entry in sorted(found, key=lambda pair: str(pair[0]))}


def _unpacked(name: str, entry: Mapping[str, Any]) -> tuple[str, NDArray[Any]]:
    kind, shape, data = entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])
    if kind not in READ:
        raise ValueError(f"{name}: got the type {kind}, needs one of {', '.join(READ)}")
    dtype = READ[kind]
    size = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    if len(data) != size * math.prod(shape):
        raise ValueError(f"{name}: got {len(data)} bytes for the shape {shape} of {dtype}")
    if dtype == "bfloat16":
        bits = np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)
        return dtype, bits.view(np.float32).reshape(shape)
    return dtype, np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape)


def unpack(data: bytes) -> tuple[dict[str, tuple[str, NDArray[Any]]], dict[str, Any]]:
    """Return the arrays of an .npz or a safetensors file of the user's, whatever its name, and the metadata.

    Raises
    ------
    ValueError
        If it is neither, is damaged, or unpacks to more than `refattn.files.largest` bytes: none is unpacked then.
    """
    if data[:2] != b"PK":
        found = decode(data)
        return found, parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            check_size(sum(entry.file_size for entry in archive.infolist()), "unpacked ")
            arrays = {name: _from_npy(name, archive.read(entry)) for name, entry in entries.items()}
    except ValueError:
        raise
    except Exception as error:  # what damage makes of it depends on where it is
        raise ValueError(f"no .npz file: {error or type(error).__name__}") from error
    texts = {name: str(x.item()) for name, x in arrays.items() if x.dtype.kind == "U" and x.ndim == 0}
    return {name: (x.dtype.name, x) for name, x in arrays.items() if name not in texts}, texts


def _from_npy(name: str, data: bytes) -> NDArray[Any]:
    """Return the array of an .npy file; one whose header lies about its size makes no memory be taken."""
    stream, reads = (
        io.BytesIO(data),
        {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0},
    )
    version = np.lib.format.read_magic(stream)
    if version not in reads:
        raise ValueError(f"{name}: got version {version} of .npy, needs 1.0 or 2.0")
    shape, fortran, dtype = reads[version](stream)
    if dtype.kind not in "biufU":
        raise ValueError(f"{name}: got dtype {dtype}, needs numbers")
    if (size := math.prod(shape) * dtype.itemsize) != len(data) - stream.tell():
        raise ValueError(
            f"{name}: got {len(data) - stream.tell()} bytes for the shape {shape} of {dtype}, needs {size}"
        )
    x = np.frombuffer(data, dtype, offset=stream.tell()) if size else np.zeros(math.prod(shape), dtype)
    return x.reshape(shape, order="F" if fortran else "C").astype(dtype.newbyteorder("="), order="C", copy=False)
