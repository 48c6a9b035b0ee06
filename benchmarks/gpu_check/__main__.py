"""The first hour on GPUs: ``python -m benchmarks.gpu_check``, or ``make test-gpu``.

    steps.py, in order --> condition --no--> not run, with the reason
                               |
                              yes --> a process with a time limit --> DIR/STEP.log, DIR/STEP.json --> DIR/report.md

A second call goes on with the steps that have not passed. Exit status: 0 if no step failed, in this call or before it;
1 if one did; 2 if nothing could be run. A step that was not run does not count as passed anywhere.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.gpu_check.machine import REPOSITORY, Machine, ask, commit, has_package
from benchmarks.gpu_check.report import about, gpus, report
from benchmarks.gpu_check.results import Result, Results
from benchmarks.gpu_check.running import run
from benchmarks.gpu_check.steps import STEPS, Step

VARIABLES = {
    "PYTHONPATH": str(REPOSITORY),
    "PYTHONUNBUFFERED": "1",
    "NO_COLOR": "1",
    # Nothing is downloaded or reported, and an engine is not a fork of a process that has used CUDA.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def parse(argv: Sequence[str] | None, steps: Sequence[Step]) -> argparse.Namespace:
    """Return the arguments."""
    names = [step.name for step in steps]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description="The first hour on GPUs")
    parser.add_argument("--list", action="store_true", help="show the steps and their results, and run nothing")
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="STEP", help="run only these, unless they have passed"
    )
    parser.add_argument("--again", nargs="+", choices=names, metavar="STEP", help="forget their results first")
    parser.add_argument(
        "--directory", type=Path, default=Path(".headrace/test-gpu"), help="results and report (.headrace/test-gpu)"
    )
    return parser.parse_args(argv)


def why_not(step: Step, machine: Machine, *, is_installed: Callable[[str], bool] = has_package) -> str | None:
    """Return why a step cannot run on this machine; None if it can."""
    num_gpus = len(machine.gpus)
    if num_gpus < step.num_gpus:
        return f"needs {step.num_gpus} GPUs, there {'is' if num_gpus == 1 else 'are'} {num_gpus}"
    if missing := [name for name in step.packages if not is_installed(name)]:
        return f"needs the package {' and '.join(missing)}"
    for index, gpu in enumerate(machine.gpus[: step.num_gpus]):
        if gpu.free_gib < step.gpu_gib:
            return f"needs {step.gpu_gib:g} GiB of GPU memory, GPU {index} has {gpu.free_gib:.1f} free"
    return None


def main(
    argv: Sequence[str] | None = None, *, steps: Sequence[Step] = STEPS, machine: Callable[[], Machine] = ask
) -> int:
    """Run the steps that have not passed, and return the exit status."""
    arguments = parse(argv, steps)
    results = Results(arguments.directory.absolute())
    if arguments.list:
        _list(steps, results)
        return 0
    try:
        here = machine()
    except RuntimeError as error:
        return _cannot(f"cannot begin: {error}")
    if not here.gpus:
        return _cannot(f"needs an NVIDIA GPU and a CUDA build of torch; torch {here.versions['torch']} sees no GPU")
    if (why := results.why_not_for(here)) is not None:
        return _cannot(f"cannot begin: {why}")
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is signal.SIG_DFL:  # not under nohup
            signal.signal(ending, signal.default_int_handler)
    for step in steps:
        if step.name in (arguments.again or ()):
            results.forget(step)
    _say(f"{gpus(here)}; {about(here)}; results in {results.directory}")
    try:
        for number, step in enumerate(steps, start=1):
            before = results.of(step)
            if step.name in (arguments.only or [step.name]) and (before is None or before.outcome != "passed"):
                _say(f"{number} of {len(steps)}, {step.name}: {step.shows}")
                _run(step, here, results)
                _write(steps, here, results)
    except KeyboardInterrupt:
        _say(f"interrupted; the next call goes on. The results so far are in {results.report}")
        return 130
    _write(steps, here, results)
    print(results.report.read_text(encoding="utf-8"))
    _say(f"this report is in {results.report}")
    return 1 if any(result.outcome == "failed" for result in results.all(steps).values()) else 0


def _run(step: Step, machine: Machine, results: Results) -> None:
    results.forget(step)
    if (why := why_not(step, machine)) is not None:
        result = Result("not run", why)
    else:
        ended = run(
            command(step, results),
            directory=REPOSITORY,
            environment={**os.environ, **VARIABLES},
            log=results.log(step),
            limit_s=60 * step.minutes,
            say=lambda words: _say(f"    {words[:150]}"),
        )
        result = results.judge(step, ended, commit=commit())
    results.keep(step, result)
    _say(f"    {result.outcome}{f' after {result.seconds:.0f} s' if result.commit else ''}: {result.words}")


def command(step: Step, results: Results) -> list[str]:
    """Return the command line of a step. Warnings are shown, but do not fail tests: libraries have others on a GPU."""
    more = ["-W", "default", f"--junitxml={results.xml(step)}"] if step.module[0] == "pytest" else []
    return [sys.executable, "-m", *step.module, *more]


def _write(steps: Sequence[Step], machine: Machine, results: Results) -> None:
    text = report(steps, results.all(steps), machine, day=time.strftime("%Y-%m-%d"))
    results.report.write_text(text, encoding="utf-8")


def _list(steps: Sequence[Step], results: Results) -> None:
    for step in steps:
        result = results.of(step)
        last = "" if result is None else f" [{result.outcome}: {result.words}]"
        needs = f"{step.num_gpus} GPU{'s' if step.num_gpus > 1 else ''}, {step.gpu_gib:g} GiB, {step.minutes:g} minutes"
        print(f"{step.name:16} {step.shows} ({needs}){last}")


def _cannot(why: str) -> int:
    print(f"make test-gpu {why}", file=sys.stderr)
    return 2


def _say(what: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
