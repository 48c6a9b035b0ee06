"""Stands in for a service under the launcher: answers HTTP with its pid, ends at SIGTERM, and misbehaves on request.

    python standin_service.py NAME DIRECTORY

Every start adds a line to DIRECTORY/NAME.starts with its pid, the environment variables that tests check, and the
secrets that it inherited. At its start it reads DIRECTORY/NAME.orders, a JSON object with `exit` (end at once with this
status and message), `deaf` (ignore SIGTERM), `saves` (end only once DIRECTORY/NAME.saved exists) and `child` (leave a
process in another process session behind).
"""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from shared.service.child_secrets import is_handed_on
from shared.service.secret_files import with_password
from shared.serving.listening import listening_socket


class Door(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"pid": os.getpid()}).encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  http.server's own name
        pass


def main() -> int:
    name, directory = sys.argv[1], Path(sys.argv[2])
    orders_file = directory / f"{name}.orders"
    orders: dict[str, Any] = json.loads(orders_file.read_text()) if orders_file.exists() else {}
    signals: list[int] = []

    def on_sigterm(number: int, _frame: object) -> None:
        # Not a threading.Event: the handler may run while this thread holds the event's lock, and would never return.
        if not orders.get("deaf"):
            signals.append(number)

    signal.signal(signal.SIGTERM, on_sigterm)
    shown = {key: value for key, value in os.environ.items() if key.startswith(("HEADRACE_", "VLLM_", "PYTHON"))}
    for variable in [variable for variable in shown if variable.endswith("_FILE") and is_handed_on(shown[variable])]:
        secret = Path(shown.pop(variable)).read_text()
        if variable == "HEADRACE_REDIS_PASSWORD_FILE":
            shown["HEADRACE_REDIS_URL"] = with_password(shown["HEADRACE_REDIS_URL"], secret)
        else:
            shown[variable.removesuffix("_FILE")] = secret
    with (directory / f"{name}.starts").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "at": time.monotonic(), "environment": shown}) + "\n")
    if "exit" in orders:
        sys.stderr.write(json.dumps({"level": "ERROR", "message": orders["message"]}) + "\n")
        return int(orders["exit"])
    if orders.get("child"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    address = ("127.0.0.1", int(os.environ["HEADRACE_PORT"]))
    server = http.server.ThreadingHTTPServer(address, Door, bind_and_activate=False)
    server.socket.close()
    server.socket = listening_socket(*address)
    threading.Thread(target=server.serve_forever, daemon=True, name="http").start()
    while not signals:
        time.sleep(0.05)
    while orders.get("saves") and not (directory / f"{name}.saved").exists():
        time.sleep(0.05)
    with (directory / "stopped").open("a") as file:
        file.write(name + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
