"""A generator's entry in ``headrace:{RUN}:generators`` while it takes part in a run."""

import msgspec


class Registration(msgspec.Struct, frozen=True, omit_defaults=True):
    """One replica.

    Attributes:
        url: Address at which the trainer reaches it.
        doing: Its work before it can serve the run, such as "loading the model"; empty while it serves.
    """

    url: str
    doing: str = ""


def decode_registration(data: bytes | str) -> Registration:
    """Decode an entry. An entry that cannot be read gives a Registration without an address."""
    try:
        return msgspec.json.decode(data, type=Registration)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Registration(url="")
