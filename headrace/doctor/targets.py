"""Where to look, and with which keys: from options, from the environment, or from what `headrace up` wrote down.

--url, HEADRACE_URL               run API; then --rewarder-url, --generator-url, --redis-url name the others
--state-dir, ./.headrace          everything that `headrace up` runs here
HEADRACE_API_KEY, HEADRACE_INTERNAL_KEY, HEADRACE_REDIS_URL, HEADRACE_REWARDER_URL

Options come before the environment, and that before what `headrace up` wrote down; where a variable wins over that, the
targets say so. HEADRACE_API_KEY_FILE, HEADRACE_INTERNAL_KEY_FILE and HEADRACE_REDIS_PASSWORD_FILE name files that hold
secrets, as for the services, so that doctor needs nothing more where one of them runs.
"""

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import SplitResult, quote, urlsplit

from headrace import embedded_redis, service_finder
from headrace.known_keys import KEY_NAMES, key_of_environment, key_of_local_service, secret_of
from headrace.state_dir import StateDir
from shared.errors import UserError


@dataclass(frozen=True)
class Targets:
    """What to examine. Empty keys and addresses are not known."""

    api_url: str = ""
    rewarder_urls: tuple[str, ...] = ()
    generator_urls: tuple[str, ...] = ()
    redis_url: str = field(default="", repr=False)
    api_key: str = field(default="", repr=False)
    internal_key: str = field(default="", repr=False)
    timeout_s: float = 5.0
    overruled: tuple[tuple[str, str], ...] = ()
    """Variables that were used, each with what `headrace up` wrote down and was not."""


def find_targets(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Targets:
    """Return what the arguments and the environment name.

    Raises:
        UserError: They name nothing, or nothing that can be asked.
    """
    url = arguments.url or ("" if arguments.state_dir else environment.get("HEADRACE_URL", ""))
    named = bool(url or arguments.rewarder_url or arguments.generator_url or arguments.redis_url)
    if not named:
        return _local(arguments, environment)
    for address in (url, *arguments.rewarder_url, *arguments.generator_url):
        _refuse_unless_http(address)
    rewarders = arguments.rewarder_url or [found for found in [environment.get("HEADRACE_REWARDER_URL", "")] if found]
    return Targets(
        api_url=url.rstrip("/"),
        rewarder_urls=tuple(address.rstrip("/") for address in rewarders),
        generator_urls=tuple(address.rstrip("/") for address in arguments.generator_url),
        redis_url=_redis_url(arguments.redis_url or environment.get("HEADRACE_REDIS_URL", ""), environment),
        api_key=key_of_environment("api_key", environment).key,
        internal_key=key_of_environment("internal_key", environment).key,
        timeout_s=arguments.timeout_s,
    )


def _local(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Targets:
    instead = ", or say with --url where the run API is"
    state, endpoint = service_finder.local_service(arguments, instead=instead)
    is_named, own = bool(arguments.state_dir), state.keys()
    known = {name: key_of_local_service(name, state, is_named=is_named, environment=environment) for name in KEY_NAMES}
    overruled = [
        (known[name].source, f"the key in {state.key_file(name)}")
        for name in KEY_NAMES
        if known[name].key != getattr(own, name)
    ]
    rewarder_url = ("" if is_named else environment.get("HEADRACE_REWARDER_URL", "")) or endpoint.rewarder_url
    if rewarder_url != endpoint.rewarder_url:
        _refuse_unless_http(rewarder_url)
        overruled.append(("HEADRACE_REWARDER_URL", f"the rewarder at {endpoint.rewarder_url}"))
    redis_url = _redis_url(environment.get("HEADRACE_REDIS_URL", ""), environment)
    if "redis" in endpoint.processes:
        embedded = embedded_redis.url(_embedded_port(state), own.redis_password)
        if is_named or not redis_url:
            redis_url = embedded
        elif redis_url != embedded:
            overruled.append(("HEADRACE_REDIS_URL", "the Redis that runs beside the services"))
    return Targets(
        api_url=endpoint.api_url,
        rewarder_urls=(rewarder_url.rstrip("/"),),
        generator_urls=endpoint.generator_urls,
        redis_url=redis_url,
        api_key=known["api_key"].key,
        internal_key=known["internal_key"].key,
        timeout_s=arguments.timeout_s,
        overruled=tuple(overruled),
    )


def _embedded_port(state: StateDir) -> int:
    file = state.redis / "valkey.conf"
    try:
        found = re.search(r"^port (\d+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    if found is None:
        raise UserError(f"{file} names no port")
    return int(found[1])


def _redis_url(url: str, environment: Mapping[str, str]) -> str:
    """Return the URL, with the password of HEADRACE_REDIS_PASSWORD_FILE if it has a user and no password."""
    if not url:
        return ""
    if not url.startswith(("redis://", "rediss://")):
        raise UserError(f"{url.partition('@')[2] or url} is no redis:// or rediss:// address")
    try:
        parts = _split(url)
    except UserError:
        raise UserError(
            "the address of Redis cannot be read: percent-encode the password in it, or leave it out and name a file "
            "that holds it in HEADRACE_REDIS_PASSWORD_FILE"
        ) from None  # what is wrong with it may be a part of the password
    file = environment.get("HEADRACE_REDIS_PASSWORD_FILE", "")
    if not file or parts.password:
        return url
    host, password = parts.netloc.rpartition("@")[2], secret_of(file, "HEADRACE_REDIS_PASSWORD_FILE")
    return parts._replace(netloc=f"{parts.username or ''}:{quote(password, safe='')}@{host}").geturl()


def is_loopback(url: str) -> bool:
    """Return whether nobody but this machine can use an address."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _refuse_unless_http(url: str) -> None:
    if url and not (url.startswith(("http://", "https://")) and _split(url).hostname):
        raise UserError(f"{url} is no http:// or https:// address")


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise UserError(f"an address cannot be read: {error}") from error
    return parts
