"""The code that all services share: stream messages, Redis access, HTTP bodies between services, settings, errors."""
