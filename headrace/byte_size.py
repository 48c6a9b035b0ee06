"""Formats numbers of bytes for people."""

GIB, _MIB, _KIB = 1 << 30, 1 << 20, 1 << 10


def sized(num_bytes: float) -> str:
    """Format a number of bytes in the largest fitting unit of GiB, MiB, KiB and bytes, such as ``1.5 GiB``."""
    for unit, size in (("GiB", GIB), ("MiB", _MIB), ("KiB", _KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:,.0f} bytes"
