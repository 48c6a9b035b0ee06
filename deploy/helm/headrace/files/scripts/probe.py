"""Asks the service in this container how it is; exit status 0 if well. Kubernetes runs it, with Python alone.

    probe.py /livez                                  the loop turns
    probe.py /readyz [--well-if "no run to serve"]   it can work; or the reason why not is the one that is well
    probe.py --fresh FILE SECONDS                    a file was touched lately

The key is read from where the service reads it, sent along, and shown nowhere.
"""

import http.client
import json
import os
import sys
import time

TIMEOUT_S = 4.0


def ask(path):
    """Return the status and what the answer gives as reason."""
    headers = {}
    key_file = os.environ.get("HEADRACE_API_KEY_FILE", "")
    if key_file:
        with open(key_file, encoding="utf-8") as file:
            headers["Authorization"] = "Bearer " + file.read().strip()
    connection = http.client.HTTPConnection("127.0.0.1", int(os.environ["HEADRACE_PORT"]), timeout=TIMEOUT_S)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    try:
        body = json.loads(answer.read(65536) or b"{}")
    except ValueError:
        body = {}
    return answer.status, str(body.get("reason") or body.get("detail") or "")


def main(arguments):
    """Return the exit status; what is wrong goes to stdout, where Kubernetes takes it from."""
    if arguments[0] == "--fresh":
        age_s = time.time() - os.stat(arguments[1]).st_mtime
        print(f"touched {age_s:.0f} s ago")
        return 0 if age_s <= float(arguments[2]) else 1
    well_if = arguments[2] if arguments[1:2] == ["--well-if"] else None
    try:
        status, reason = ask(arguments[0])
    except (OSError, http.client.HTTPException) as error:
        print(f"{arguments[0]}: {error}")
        return 1
    print(f"{arguments[0]}: {status} {reason}")
    return 0 if status == 200 or (reason and reason == well_if) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
