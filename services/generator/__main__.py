"""Entry point of the generator: ``python -m services.generator``.

    HTTP server --+
    run follower -+-- the first of these to end ends the process
    signals ------+
    weight alarm -+   set when a weight push leaves vLLM stuck or in an unknown state

Exit codes: 0 stopped by a signal; 1 failed, a restart may help; 2 a setting is wrong, a restart does not help.
"""

import argparse

from shared.service.exiting import exit_at_once

_HELP = """\
Samples completions for the current run in Redis. All settings are environment variables:

  HEADRACE_REDIS_URL        where Redis is (redis://127.0.0.1:6379/0)
  HEADRACE_HOST, _PORT      where to listen (127.0.0.1, 8000)
  HEADRACE_ADVERTISE_URL    where the trainer reaches this replica (http://HOST:PORT)
  HEADRACE_PUSH_ADDRESS     name or address of this host on the network with the trainer; NCCL uses its interface
  HEADRACE_API_KEY          bearer key of /v1; or HEADRACE_API_KEY_FILE
  HEADRACE_INTERNAL_KEY     bearer key of /internal; or HEADRACE_INTERNAL_KEY_FILE
  HEADRACE_API_KEYS_FILE    file of named keys with scopes; reloaded when it changes
  HEADRACE_TLS_CERT_FILE    certificate to serve HTTPS with, and HEADRACE_TLS_KEY_FILE its key
  HEADRACE_REPLICA_ID       stable name of this replica (host name, and port unless 8000)
  HEADRACE_ENGINE_ARGS      JSON object of vLLM engine arguments, such as {"gpu_memory_utilization": 0.8}; they
                            override a run's
  HEADRACE_DEFAULT_ENGINE_ARGS  the same, but a run's override them
  HEADRACE_GPU_CLAIMS_DIR   directory that all replicas on this machine share; each claims its own GPUs there
  HEADRACE_GPUS_PER_REPLICA GPUs that a replica claims (1); without the directory, vLLM chooses among all visible GPUs
  HEADRACE_METRICS_PORT     port of /metrics; 0 is off (0)
  HEADRACE_LOG_FORMAT       json or text (json)
"""


def main(argv: list[str] | None = None) -> int:
    """Run the generator until it stops, and return the process's exit code. ``--help`` is the only option."""
    parser = argparse.ArgumentParser(
        prog="python -m services.generator", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(argv)

    import logging
    import os

    from services.generator.engine.gpu_claim import claim_gpus
    from services.generator.engine.spawned import watch_children
    from services.generator.engine.vllm_environment import claim_compile_cache, is_cpu_build, set_environment
    from services.generator.settings import read_settings
    from shared.errors import UserError
    from shared.interfaces import let_nccl_use
    from shared.service.child_secrets import hide_secrets
    from shared.service.logs import configure_first_logging, configure_logging, log_lines
    from shared.service.variable_names import warn_of_unknown_variables

    configure_first_logging(os.environ)
    warn_of_unknown_variables(os.environ)
    try:
        settings = read_settings()
        hide_secrets(os.environ)
        configure_logging(settings.log_level, log_format=settings.log_format)
        if settings.gpu_claims_dir is not None:
            claim_gpus(settings.gpu_claims_dir, num_gpus=settings.gpus_per_replica, environment=os.environ)
        if settings.push_address:
            try:
                let_nccl_use(settings.push_address, os.environ)
            except OSError as error:
                raise UserError(
                    f"HEADRACE_PUSH_ADDRESS: {settings.push_address} must be a name or an address of this host: {error}"
                ) from error
        is_cpu = is_cpu_build()
        set_environment(os.environ, is_cpu=is_cpu, log_level=settings.log_level)
        if not is_cpu:  # the CPU build compiles nothing
            claim_compile_cache(os.environ)

        watch_children()

        from services.generator.process import run_process

        return run_process(settings)
    except UserError as error:
        log_lines(logging.getLogger("services.generator"), error)
        return 2


if __name__ == "__main__":
    exit_at_once(main())  # without waiting for threads that load a model or serve metrics
