"""Checks whether this service may open the files and directories that a run names. Each service checks its own."""

import os
import re
from typing import Any, Final, cast

from shared.errors import UserError
from shared.files.file_roots import FileRoots
from shared.run_options.engine_arg_names import MODEL_FREE_METHODS
from shared.run_options.run_config import RunConfig

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_FORMATS: Final = frozenset(
    {
        *("arrow", "audiofolder", "cache", "csv", "generator", "hdf5", "imagefolder", "json", "lance", "niftifolder"),
        *("pandas", "parquet", "pdffolder", "spark", "sql", "text", "videofolder", "webdataset", "xml", "eval"),
        *("conll", "fasta", "fastq", "genbank", "harbor", "iceberg", "meshfolder", "mmcif", "pdb", "tsfile", "vortex"),
    }
)
"""Names that the datasets library takes for files of its working directory."""


def misplaced(
    config: RunConfig, *, data: FileRoots, weights: FileRoots, opens_data_sets: bool = True
) -> list[tuple[str, str]]:
    """Return (setting, reason) for each name that this service may not open: outside the roots, or not a hub id."""
    sources = dict(filter(None, [*config.train_sources().items(), config.eval_source()])) if opens_data_sets else {}
    named: list[tuple[str, str, FileRoots, bool]] = [("model", config.model, data, True)]
    named += [(field, source.path, data, not source.is_file) for field, source in sources.items()]
    named += [("vllm", model, data, True) for model in _draft_models(config.vllm)]
    if config.weight_dir is not None:
        named.append(("weight_dir", config.weight_dir, weights, False))
    errors: list[tuple[str, str]] = []
    for field, path, roots, whole in named:
        if not path.startswith("/") and "://" not in path:
            if (why := _not_of_the_hub(path) or (_no_draft_model(path) if field == "vllm" else None)) is not None:
                errors.append((field, why))
            continue
        try:
            roots.require(path, field=field, whole=whole)
        except UserError as error:
            errors.append((field, str(error)))
    return errors


def require_places(config: RunConfig, *, data: FileRoots, weights: FileRoots, opens_data_sets: bool = True) -> None:
    """Raise UserError if the run names a file or directory that this service may not open."""
    for field, sentence in misplaced(config, data=data, weights=weights, opens_data_sets=opens_data_sets):
        raise UserError(sentence, field=field)


def _not_of_the_hub(name: str) -> str | None:
    """Return why a name cannot be a hub id, because libraries would read local files instead; None if it can."""
    if name in _FORMATS:
        return f"{name!r} is a format and not a data set; name a file, or a Hugging Face id"
    if name and os.path.exists(name):
        return (
            f"{name!r} is also a file or directory where the service runs, which is never used; give an absolute path"
        )
    return None


def _no_draft_model(name: str) -> str | None:
    """Return why a name cannot be the id of a draft model; None if it can. The run API checks other models itself."""
    if name in MODEL_FREE_METHODS or (_HUB_ID.fullmatch(name) and ".." not in name):
        return None
    return f"{name[:200]!r} is neither an absolute path nor a Hugging Face id"


def _draft_models(vllm: dict[str, Any]) -> list[str]:
    table = vllm.get("speculative_config")
    found = [vllm.get("spec_model"), cast("dict[str, Any]", table).get("model") if isinstance(table, dict) else None]
    return [model for model in found if isinstance(model, str)]
