"""Copies files from other folders of deploy/ into the chart: ``python deploy/helm/copy_files.py``.

    deploy/redis/*                                ->  files/redis/
    deploy/observability/alerts/*.yml             ->  files/observability/alerts/
    deploy/observability/grafana/dashboards/*     ->  files/observability/dashboards/

A chart can use only files in its own folder. Edit the originals, not the copies; a test compares them.
"""

import sys
from pathlib import Path

DEPLOY = Path(__file__).resolve().parent.parent
FILES = DEPLOY / "helm" / "headrace" / "files"
SOURCES = {
    "redis": "redis/*",
    "observability/alerts": "observability/alerts/*.yml",
    "observability/dashboards": "observability/grafana/dashboards/*.json",
}


def wanted() -> dict[Path, bytes]:
    """Return the expected content of each copy, by path."""
    return {
        FILES / folder / source.name: source.read_bytes()
        for folder, pattern in SOURCES.items()
        for source in sorted(DEPLOY.glob(pattern))
    }


def copies() -> dict[Path, bytes]:
    """Return what each copy holds."""
    return {path: path.read_bytes() for folder in SOURCES for path in sorted((FILES / folder).glob("*"))}


def main() -> int:
    """Copy, and remove copies of what is gone."""
    files = wanted()
    for path in copies().keys() - files.keys():
        path.unlink()
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    sys.stdout.write(f"{len(files)} files\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
