"""Entry point of the simulated generator: ``python -m services.generator.simulated``.

Exit codes, as for services.generator: 0 stopped by a signal; 1 failed, a restart may help; 2 a setting is wrong, a
restart does not help.
"""

import argparse

from shared.service.exiting import exit_at_once

_HELP = """\
Generator replicas without a model: times are drawn from a distribution, tokens are random. For benchmarks and planning:
a model trained on them is useless. Reads the environment variables of services.generator, except HEADRACE_ENGINE_ARGS,
and:

"""


def main(argv: list[str] | None = None) -> int:
    """Run simulated replicas until the process is stopped or fails, and return its exit code: 0, 1 or 2."""
    import logging
    import os

    from services.generator.settings import read_settings
    from services.generator.simulated.simulation_settings import SimulationSettings, read_simulation_settings
    from shared.errors import UserError
    from shared.service.child_secrets import hide_secrets
    from shared.service.logs import configure_first_logging, configure_logging, log_lines
    from shared.service.variable_names import warn_of_unknown_variables

    options = "\n".join(
        f"  HEADRACE_SIMULATED_{name.upper()}\n      {field.description} ({field.default})"
        for name, field in SimulationSettings.model_fields.items()
    )
    parser = argparse.ArgumentParser(
        prog="python -m services.generator.simulated",
        description=_HELP + options,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--replicas", type=_positive, default=1, metavar="N", help="replicas in this process (1)")
    arguments = parser.parse_args(argv)
    configure_first_logging(os.environ)
    warn_of_unknown_variables(os.environ, simulated=SimulationSettings.model_fields)
    try:
        settings = read_settings()
        hide_secrets(os.environ)
        simulation = read_simulation_settings()
        configure_logging(settings.log_level, log_format=settings.log_format)

        from services.generator.simulated.simulated_process import run_process

        return run_process(settings, simulation, num_replicas=arguments.replicas)
    except UserError as error:
        log_lines(logging.getLogger("services.generator.simulated"), error)
        return 2


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


if __name__ == "__main__":
    exit_at_once(main())  # without waiting for a thread that imports torch or reads a model's files
