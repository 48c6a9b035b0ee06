"""Makes bad messages from good ones, by changing their content or their bytes. A seed reproduces each message.

seed bytes --decode--> tree --one to three changes--> tree --encode--> bytes
seed bytes --one to four changes of bytes--> bytes
"""

import json
import math
import random
import struct
from collections.abc import Callable
from typing import Any, TypeGuard

import msgspec

INTEGERS = (-(2**63), -(2**31), -7, -1, 0, 1, 2, 255, 1023, 1024, 1025, 10**8, 2**31 - 1, 2**31, 2**53, 2**53 + 1,
            10**12, 2**63 - 1, 2**64 - 1)  # fmt: skip
FLOATS = (math.nan, math.inf, -math.inf, -1.0, -0.0, 1e-3, 1e11, 1.7e12, 1e300, -1e300, 5e-324)
TEXTS = ("", "\x00", "../../x", "00000007", "9" * 5000, "\u0663", "eval-", "scored", "timeout", "stop", "a" * 300, "é")
WORDS = tuple(struct.pack("<i", number) for number in (-(2**31), -7, -1, 0, 64, 2**31 - 1)) + tuple(
    struct.pack("<f", number) for number in (math.nan, math.inf, -math.inf, 1e-3, 2e-3, 1.0, -1e30)
)
Encode = Callable[[Any], bytes]
Decode = Callable[[bytes], Any]


def deep(levels: int) -> list[Any]:
    """Return lists within lists."""
    nested: list[Any] = []
    for _ in range(levels):
        nested = [nested]
    return nested


def mutated(seeds: list[bytes], chance: random.Random, *, decode: Decode, encode: Encode) -> bytes:
    """Return a message that a client might send instead of a message from ``seeds``."""
    seed = chance.choice(seeds)
    if chance.random() < 0.3:
        return other_bytes(seed, seeds, chance)
    tree = [decode(seed)]
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        _change(tree, chance)
    try:
        data = encode(tree[0])
    except (TypeError, ValueError, OverflowError, RecursionError):  # a value that no encoder can write cannot be sent
        return other_bytes(seed, seeds, chance)
    return other_bytes(data, seeds, chance) if chance.random() < 0.05 else data


def msgpack_tree(data: bytes) -> Any:
    """Return the content of a msgpack message."""
    return msgspec.msgpack.decode(data)


def json_tree(data: bytes) -> Any:
    """Return the content of a JSON body."""
    return json.loads(data)


def to_json(tree: Any) -> bytes:
    """Return JSON as Python writes it, including NaN and Infinity."""
    return json.dumps(tree, default=repr).encode()


def is_table(value: object) -> TypeGuard[dict[Any, Any]]:
    """Whether it is a dict."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether it is a list."""
    return isinstance(value, list)


def _keys(node: object) -> list[Any]:
    """Return the keys or indices of a node of a tree; none for a leaf."""
    return list(node) if is_table(node) else list(range(len(node))) if is_list(node) else []


def _change(tree: list[Any], chance: random.Random) -> None:
    """Change one place of a tree; ``tree[0]`` is its root."""
    places: list[tuple[Any, Any]] = []
    unseen: list[Any] = [tree]
    while unseen:
        node = unseen.pop()
        places += [(node, key) for key in _keys(node)]
        unseen += [node[key] for key in _keys(node)]
    node, key = chance.choice(places)
    what = chance.randrange(10)
    if what == 0 and node is not tree:
        del node[key]
    elif what == 1 and is_list(node):
        node.insert(chance.randrange(len(node) + 1), node[key])
    elif what == 2:
        other, other_key = chance.choice(places)
        node[key] = chance.choice(INTEGERS) if _keys(other[other_key]) else other[other_key]
    elif what == 3 and is_table(node):
        node[chance.choice(TEXTS)] = node.pop(key)
    else:
        node[key] = _changed(node[key], chance)


def _changed(value: Any, chance: random.Random) -> Any:
    """Return a value that is close to the original, or completely different."""
    if chance.random() < 0.1:
        return chance.choice((None, True, [], {}, "", b"", deep(40), {"a": {1: 2}}, chance.choice(TEXTS)))
    match value:
        case bool():
            return not value
        case int():
            return chance.choice((value + 1, value - 1, -value, value * 2, *INTEGERS))
        case float():
            return chance.choice((value + 1, -value, *FLOATS))
        case str():
            return chance.choice((value + "x", value[1:], value.upper(), *TEXTS))
        case bytes():
            return _with_other_words(value, chance)
        case _ if is_list(value):
            return chance.choice((value[1:], value[::-1], value + value, value[:1] * len(value), []))
        case _:
            return chance.choice((*INTEGERS, *FLOATS))


def _with_other_words(packed: bytes, chance: random.Random) -> bytes:
    """Return packed numbers with one inserted, or with fewer or more of them."""
    at = 4 * chance.randrange(len(packed) // 4 + 1)
    match chance.randrange(6):
        case 0:
            return packed[:at]
        case 1:
            return packed + chance.choice(WORDS)
        case 2:
            return packed[: chance.randrange(len(packed) + 1)]
        case 3:
            one = bytes([chance.choice((0, 1, 2, 255))])
            return packed[:at] + one + packed[at + 1 :]
        case _:
            return packed[:at] + chance.choice(WORDS) + packed[at + 4 :]


def other_bytes(data: bytes, seeds: list[bytes], chance: random.Random) -> bytes:
    """Return the message with one to four changes of its bytes."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(7):
            case 0:
                del changed[at:]
            case 1:
                del changed[at : at + chance.randint(1, 8)]
            case 2:
                changed[at:at] = chance.randbytes(chance.randint(1, 8))
            case 3:
                other = chance.choice(seeds)
                begin = chance.randrange(len(other))
                changed[at : at + 16] = other[begin : begin + 16]
            case _ if at < len(changed):
                changed[at] = chance.choice((changed[at] ^ (1 << chance.randrange(8)), chance.randrange(256)))
            case _:
                pass
    return bytes(changed)
