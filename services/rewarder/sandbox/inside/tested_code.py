"""The process of the code under test: runs the code, then answers the judge's requests.

    judge --one line of JSON per request-->  call f(...), get an attribute, ...  --one line per reply--> judge

It does not know the tests and the expected values, only the arguments of each call. The code is untrusted and can
change this process, so the judge treats its replies as data only.
"""

import contextlib
import itertools
import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

from services.rewarder.sandbox.inside.plain_data import decode, encode

_objects: list[Any] = []


def _number_of(value: Any) -> int:
    _objects.append(value)
    return len(_objects) - 1


def _object_of(number: int) -> Any:
    return _objects[number]


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    subject = _objects[request["of"]]
    arguments = [decode(item, _object_of) for item in request["args"]]
    named = {name: decode(item, _object_of) for name, item in request["kwargs"].items()}
    do = request["do"]
    if do == "call":
        value = subject(*arguments, **named)
    elif do == "get":
        value = getattr(subject, *arguments)
    elif do == "set":
        setattr(subject, *arguments)
        value = None
    elif do == "item":
        value = subject[arguments[0]]
    elif do == "iter":
        value = iter(subject)
        return {"value": ["object", _number_of(value)]}
    elif do == "next":
        few: list[Any] = list(itertools.islice(subject, 1))
        return {"value": ["list", [encode(item, _number_of) for item in few]]}
    else:
        asked: dict[str, Callable[[Any], Any]] = {"len": len, "bool": bool, "str": str, "repr": repr}
        value = asked[do](subject)
    changed = [_changed(*pair) for pair in zip(request["args"], arguments, strict=True)]
    return {"value": encode(value, _number_of), "args": changed}


def _changed(sent: Any, argument: Any) -> Any:
    """Return a list, dict or set argument, encoded, if the call changed it. If not, return None.

    Args:
        sent: The argument as the judge sent it.
        argument: The argument after the call.
    """
    if not isinstance(argument, list | dict | set):
        return None
    encoded = encode(argument, _number_of)
    return None if json.dumps(encoded) == json.dumps(sent) else encoded


def _describe(error: BaseException) -> list[str]:
    try:
        said = error.args[0] if isinstance(error, KeyError) and len(error.args) == 1 else error  # its str() is a repr()
        return [type(error).__name__, str(said)[:200]]
    except BaseException:  # noqa: BLE001  not ours
        return [type(error).__name__, ""]


def _reply(outgoing: Any, content: dict[str, Any]) -> None:
    outgoing.write(json.dumps(content).encode() + b"\n")
    outgoing.flush()


def main() -> None:
    """Load the code under test, then answer the judge's requests until the judge closes the pipe."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # discards what the code prints
        os.dup2(nothing, number)
    first = json.loads(incoming.readline())
    # If memory runs out, the kernel must kill the code and not the judge. The judge cannot set this for the code: for a
    # moment after the start it may not open this file.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
        file.write("1000")
    resource.setrlimit(resource.RLIMIT_CPU, (first["cpu_s"], first["cpu_s"] + 1))
    namespace: dict[str, Any] = {"__name__": "solution"}
    try:
        exec(compile(first["code"], "<completion>", "exec"), namespace)
        names = {
            name: ["module", value.__name__] if isinstance(value, type(sys)) else ["value", encode(value, _number_of)]
            for name, value in list(namespace.items())
            if not name.startswith("__")
        }
        _reply(outgoing, {"names": names})
    except BaseException as error:  # noqa: BLE001  not ours
        _reply(outgoing, {"raised": _describe(error)})
        return
    for line in incoming:
        try:
            reply = _answer(json.loads(line))
        except BaseException as error:  # noqa: BLE001  not ours
            reply = {"raised": _describe(error)}
        _reply(outgoing, reply)


if __name__ == "__main__":
    main()
