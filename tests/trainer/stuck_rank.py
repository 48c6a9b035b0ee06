"""A training rank that ends, with the error that ``ENDS_WITH`` names, while a thread of it is stuck in torch."""

import os
import runpy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shared import errors
from shared.redis import redis_readiness

if __name__ == "__main__":

    async def end(*_: Any, **__: Any) -> None:
        name = os.environ["ENDS_WITH"]
        raise getattr(errors, name, RuntimeError)("this is the end")

    ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch").submit(threading.Event().wait)
    redis_readiness.wait_until_back = end
    runpy.run_module("services.trainer.rank", run_name="__main__")
