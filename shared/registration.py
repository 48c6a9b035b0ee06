"""What a generator says of itself in ``headrace:{RUN}:generators`` while it is there for a run."""

import msgspec


class Registration(msgspec.Struct, frozen=True, omit_defaults=True):
    """One replica.

    Attributes:
        url: Where the trainer reaches it.
        doing: What it does instead of serving the run, such as "loading the model"; empty while it serves.
    """

    url: str
    doing: str = ""


def decode_registration(data: bytes | str) -> Registration:
    """Return what was registered; one without an address if it cannot be read."""
    try:
        return msgspec.json.decode(data, type=Registration)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Registration(url="")
