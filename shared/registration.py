"""A generator's entry in the Redis hash ``headrace:{RUN}:generators`` while it takes part in a run."""

import msgspec


class Registration(msgspec.Struct, frozen=True, omit_defaults=True):
    """The address and the current work of one generator replica.

    Attributes:
        url: Address at which the trainer reaches it.
        doing: Its work before it can serve the run, such as "loading the model"; empty while it serves.
    """

    url: str
    doing: str = ""


def decode_registration(data: bytes | str) -> Registration:
    """Decode an entry of the hash. An unreadable entry becomes a Registration with an empty ``url``."""
    try:
        return msgspec.json.decode(data, type=Registration)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Registration(url="")
