"""Finds the addresses and keys to examine: all from options and environment, or all from the local `headrace up`.

--url, HEADRACE_URL               the run API. The other services: --rewarder-url, --sessions-url, --generator-url,
                                  --redis-url, HEADRACE_REWARDER_URL, HEADRACE_SESSIONS_URL, HEADRACE_REDIS_URL. The
                                  keys: from the environment
--state-dir, ./.headrace          everything that `headrace up` runs there, with its own keys

An address of one source is never sent a key of the other, because it may belong to another deployment. Variables that
were ignored for this reason are in ``Targets.unused``. HEADRACE_API_KEY_FILE, HEADRACE_INTERNAL_KEY_FILE and
HEADRACE_REDIS_PASSWORD_FILE name files with secrets, as they do for the services. So where a service runs, doctor needs
no other settings.
"""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace import service_finder
from headrace.addresses import redis_address, refuse_unless_http
from headrace.known_keys import key_of_environment, unused_variables
from shared.service.secret_files import without_password
from shared.service.tls import PUBLIC_TLS, PeerTls


@dataclass(frozen=True)
class Targets:
    """The addresses of the services that doctor examines, and its keys. An empty string means unknown."""

    api_url: str = ""
    rewarder_urls: tuple[str, ...] = ()
    sessions_urls: tuple[str, ...] = ()
    generator_urls: tuple[str, ...] = ()
    redis_url: str = field(default="", repr=False)
    api_key: str = field(default="", repr=False)
    internal_key: str = field(default="", repr=False)
    api_key_source: str = ""
    internal_key_source: str = ""
    timeout_s: float = 5.0
    tls: PeerTls = PUBLIC_TLS
    """TLS settings for https calls to services. Its server name is used for generators only."""
    directory: str = ""
    """The state directory of `headrace up`, if the addresses and keys come from it."""
    unused: tuple[str, ...] = ()
    """Environment variables that name other addresses or keys and were ignored."""


def find_targets(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Targets:
    """Return the addresses and keys to examine.

    They come from the arguments and the environment or, if no URL option and no HEADRACE_URL is given, from the local
    `headrace up`.

    Raises:
        UserError: No service is named and no `headrace up` runs, or an address cannot be used.
    """
    url = arguments.url or ("" if arguments.state_dir else environment.get("HEADRACE_URL", ""))
    others = (arguments.rewarder_url, arguments.sessions_url, arguments.generator_url, arguments.redis_url)
    named = bool(url or any(others))
    if not named:
        return _local(arguments, environment)
    rewarders = arguments.rewarder_url or [found for found in [environment.get("HEADRACE_REWARDER_URL", "")] if found]
    sessions = arguments.sessions_url or [found for found in [environment.get("HEADRACE_SESSIONS_URL", "")] if found]
    for address in (url, *rewarders, *sessions, *arguments.generator_url):
        refuse_unless_http(address)
    api_key, internal_key = (key_of_environment(name, environment) for name in ("api_key", "internal_key"))
    return Targets(
        api_url=url.rstrip("/"),
        rewarder_urls=tuple(address.rstrip("/") for address in rewarders),
        sessions_urls=tuple(address.rstrip("/") for address in sessions),
        generator_urls=tuple(address.rstrip("/") for address in arguments.generator_url),
        redis_url=redis_address(arguments.redis_url or environment.get("HEADRACE_REDIS_URL", ""), environment),
        api_key=api_key.key,
        internal_key=internal_key.key,
        api_key_source=api_key.source,
        internal_key_source=internal_key.source,
        timeout_s=arguments.timeout_s,
        tls=PeerTls(service_finder.ca_file_elsewhere(environment), environment.get("HEADRACE_TLS_GENERATOR_NAME", "")),
    )


def _local(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Targets:
    instead = ", or give the address of the run API with --url"
    state, endpoint = service_finder.local_service(arguments, instead=instead)
    keys, redis_url = state.keys(), state.redis_url()
    own = {
        "HEADRACE_URL": (endpoint.api_url,),
        "HEADRACE_REWARDER_URL": (endpoint.rewarder_url,),
        "HEADRACE_SESSIONS_URL": (endpoint.sessions_url,),
        "HEADRACE_REDIS_URL": (redis_url, without_password(redis_url)),
    }
    return Targets(
        api_url=endpoint.api_url,
        rewarder_urls=(endpoint.rewarder_url,),
        sessions_urls=(endpoint.sessions_url,) if endpoint.sessions_url else (),
        generator_urls=endpoint.generator_urls,
        redis_url=redis_url,
        api_key=keys.api_key,
        internal_key=keys.internal_key,
        api_key_source=str(state.key_file("api_key")),
        internal_key_source=str(state.key_file("internal_key")),
        timeout_s=arguments.timeout_s,
        tls=PeerTls(endpoint.ca_file),
        directory=str(state.path),
        unused=(
            *unused_variables("api_key", keys.api_key, environment),
            *unused_variables("internal_key", keys.internal_key, environment),
            *(name for name, used in own.items() if environment.get(name, "") not in ("", *used)),
        ),
    )
