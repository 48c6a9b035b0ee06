"""Bytes as people read them."""

GIB, _MIB, _KIB = 1 << 30, 1 << 20, 1 << 10


def sized(num_bytes: float) -> str:
    """Return bytes in the unit in which they are a readable number."""
    for unit, size in (("GiB", GIB), ("MiB", _MIB), ("KiB", _KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:,.0f} bytes"
