"""A module that imports a package which is not installed."""

import no_such_package_anywhere  # type: ignore[import-not-found]  # noqa: F401


def one(**_: object) -> list[float]:
    return []
