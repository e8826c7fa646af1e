"""Torch dtypes, their names on the server, and tensors seen as bytes."""

from __future__ import annotations

import torch

from tdio.errors import CorruptEntry, UnsupportedValue

_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
#: The dtypes that have a plain byte view, by the name that the format stores.
BY_NAME: dict[str, torch.dtype] = {
    f"torch.{name}": getattr(torch, name) for name in _NAMES if hasattr(torch, name)
}
_KNOWN = frozenset(BY_NAME.values())


def dtype_name(dtype: torch.dtype) -> str:
    """Return the stored name of ``dtype``, such as ``"torch.float32"``.

    Raises:
        UnsupportedValue: the dtype has no plain byte view (quantized types, float4).
    """
    if dtype not in _KNOWN:
        raise UnsupportedValue(f"{dtype} cannot be stored as plain bytes; convert the tensor first")
    return str(dtype)


def dtype_from_name(name: str, where: str) -> torch.dtype:
    """Return the dtype that a stored ``name`` means; ``where`` names the entry in the error.

    Raises:
        CorruptEntry: the name is not that of a storable dtype.
    """
    dtype = BY_NAME.get(name if name.startswith("torch.") else f"torch.{name}")
    if dtype is None:
        raise CorruptEntry(f"{where}: unknown dtype {name[:80]!r} in its metadata")
    return dtype


def check_plain(tensor: torch.Tensor, what: str) -> None:
    """Refuse a tensor that has no plain bytes; ``what`` says which, for the error.

    Raises:
        UnsupportedValue: a sparse, jagged or quantized tensor, or one on the meta device.
    """
    dtype_name(tensor.dtype)
    if tensor.is_meta:
        raise UnsupportedValue(f"{what} on the meta device has no bytes to store")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise UnsupportedValue(
            f"{what} of layout {tensor.layout} cannot be stored as plain bytes; store its values "
            "and indices or offsets as entries, or make it dense"
        )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``tensor`` as a 1-D uint8 tensor on the host, in C order.

    A view where the tensor is dense, contiguous and on the host, else a copy. Gradients are
    dropped; pending conjugation and negation bits are resolved.

    Raises:
        UnsupportedValue: a sparse, jagged or quantized tensor, or one on the meta device.
    """
    check_plain(tensor, "a tensor")
    flat = tensor.detach()
    if not flat.is_cpu or flat.is_conj() or flat.is_neg() or not flat.is_contiguous():
        flat = flat.to("cpu").resolve_conj().resolve_neg().contiguous()
    flat = flat.reshape(-1)
    return flat.view(torch.uint8)
