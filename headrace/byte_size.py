"""Formats numbers of bytes for people."""

GIB, _MIB, _KIB = 1 << 30, 1 << 20, 1 << 10


def sized(num_bytes: float) -> str:
    """Return the size as text, in the largest of GiB, MiB, KiB and bytes of which there is at least one."""
    for unit, size in (("GiB", GIB), ("MiB", _MIB), ("KiB", _KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:,.0f} bytes"
