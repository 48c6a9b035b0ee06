"""Everything between the HTTP server and an application, in order. It is the same for all services.

request --> RequestLog --> HeadRequests --> Door --> HttpGuard --> application
            id, log line   HEAD is GET      key      413, 408, 503
"""

from shared.access.door import Door
from shared.access.keyring import Keyring
from shared.access.request_log import RequestLog
from shared.access.route_table import RouteTable
from shared.serving.head_requests import HeadRequests
from shared.serving.http_guard import App, HttpGuard
from shared.serving.http_limits import HttpLimits


def guarded(app: App, *, routes: RouteTable, keyring: Keyring, limits: HttpLimits) -> App:
    """Return the application with everything that guards it."""
    door = Door(HttpGuard(app, limits), routes=routes, keyring=keyring)
    return RequestLog(HeadRequests(door), routes=routes)
