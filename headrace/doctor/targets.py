"""Where to look, and with which keys: from options, from the environment, or from what `headrace up` wrote down.

--url, HEADRACE_URL               run API; then --rewarder-url, --generator-url, --redis-url name the others
--state-dir, ./.headrace          everything that `headrace up` runs here
HEADRACE_API_KEY, HEADRACE_INTERNAL_KEY, HEADRACE_REDIS_URL, HEADRACE_REWARDER_URL

Keys are never options: a command line is public. HEADRACE_API_KEY_FILE, HEADRACE_INTERNAL_KEY_FILE and
HEADRACE_REDIS_PASSWORD_FILE name files that hold them, as for the services, so that doctor needs nothing more where one
of them runs.
"""

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, quote, urlsplit

from headrace import embedded_redis, process_table
from headrace.state_dir import StateDir, choose_state_dir
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
        if address and not (address.startswith(("http://", "https://")) and _has_host(address)):
            raise UserError(f"{address} is no http:// or https:// address")
    rewarders = arguments.rewarder_url or [found for found in [environment.get("HEADRACE_REWARDER_URL", "")] if found]
    return Targets(
        api_url=url.rstrip("/"),
        rewarder_urls=tuple(address.rstrip("/") for address in rewarders),
        generator_urls=tuple(address.rstrip("/") for address in arguments.generator_url),
        redis_url=_redis_url(arguments.redis_url or environment.get("HEADRACE_REDIS_URL", ""), environment),
        api_key=_secret("HEADRACE_API_KEY", environment),
        internal_key=_secret("HEADRACE_INTERNAL_KEY", environment),
        timeout_s=arguments.timeout_s,
    )


def _local(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Targets:
    state = StateDir(choose_state_dir(arguments.state_dir))
    endpoint = state.endpoint()
    if endpoint is None or not process_table.is_alive(endpoint.launcher):
        raise UserError(
            f"no headrace service found (looked at {state.path}): start one with `headrace up`, or say with --url "
            "where the run API is"
        )
    keys = state.keys()
    redis_url = _redis_url(environment.get("HEADRACE_REDIS_URL", ""), environment)
    if "redis" in endpoint.processes:
        redis_url = embedded_redis.url(_embedded_port(state), keys.redis_password)
    return Targets(
        api_url=endpoint.api_url,
        rewarder_urls=(endpoint.rewarder_url,),
        generator_urls=endpoint.generator_urls,
        redis_url=redis_url,
        api_key=keys.api_key,
        internal_key=keys.internal_key,
        timeout_s=arguments.timeout_s,
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
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{parts.username or ''}:{quote(_read(file), safe='')}@{host}").geturl()


def _secret(name: str, environment: Mapping[str, str]) -> str:
    file = environment.get(f"{name}_FILE", "")
    return environment.get(name, "") or (_read(file) if file else "")


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the secret in {file} cannot be read: {error}") from error


def _has_host(url: str) -> bool:
    return bool(_split(url).hostname)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise UserError(f"an address cannot be read: {error}") from error
    return parts
