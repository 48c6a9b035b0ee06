"""For HTTP clients that meet no TLS: ``verify=NO_TLS``. Otherwise each client loads all CAs, which takes 20 ms."""

import ssl

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
