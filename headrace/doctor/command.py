"""`headrace doctor`: examines a deployment from the outside, and says in plain words what is wrong with it."""

import argparse
import asyncio
import sys
import time

from headrace.doctor import report
from headrace.doctor.examination import examine
from headrace.doctor.findings import CANNOT_LOOK, exit_status
from headrace.doctor.targets import find_targets
from shared.errors import UserError


def doctor(arguments: argparse.Namespace) -> int:
    """Examine and show. Return 0 if all is fine, 1 if something is wrong, 2 if a check could not be made."""
    try:
        targets = find_targets(arguments)
    except UserError as error:
        sys.stderr.write(f"headrace: {report.clean(str(error))}\n")
        return CANNOT_LOOK
    began_at = time.monotonic()
    found = asyncio.run(examine(targets))
    took_s = time.monotonic() - began_at
    if arguments.json:
        sys.stdout.write(report.as_json(found, took_s=took_s) + "\n")
    else:
        report.console().print(report.as_table(found, took_s=took_s))
    return exit_status(found.findings)
