"""The arguments of `headrace keys`."""

import argparse

from headrace import service_finder
from shared.access.route_table import MEANINGS


def add_key_commands(keys: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Add the commands below `headrace keys`, and return their parsers by the name of their function."""
    commands = keys.add_subparsers(title="commands", metavar="COMMAND", required=True)
    scopes = "; ".join(f"{scope}: {meaning}" for scope, meaning in MEANINGS.items())
    add = commands.add_parser(
        "add",
        help="make a key and print it, once",
        description=f"Prints a new key on stdout and puts its hash into the keys file. Scopes: {scopes}.",
    )
    add.add_argument("name", metavar="NAME", help="name of the key in logs")
    add.add_argument(
        "--scopes", required=True, metavar="SCOPE,...", help=f"scopes of the key, from: {', '.join(MEANINGS)}"
    )
    add.add_argument("--expires", metavar="TIME", help="when it ends: 2027-01-31, or 2027-01-31T18:00Z (never)")
    listed = commands.add_parser("list", help="list the keys of the file: names, scopes, and when they end")
    revoke = commands.add_parser("revoke", help="take a key out of the file; services refuse it within two seconds")
    revoke.add_argument("name", metavar="NAME")
    for command in (add, listed, revoke):
        command.add_argument(
            "--file", metavar="FILE", help="keys file of another deployment (HEADRACE_API_KEYS_FILE, or --state-dir's)"
        )
        service_finder.add_state_dir_argument(command)
    return {"add": add, "list_keys": listed, "revoke": revoke}
