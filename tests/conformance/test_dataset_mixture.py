"""An epoch of a mixture has TRL's length and shares, and without fractions also TRL's rows."""

import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest

from services.trainer.data.dataset import open_dataset
from shared.run_options.run_config import RunConfig
from tests.conformance.oracle import trl


@pytest.mark.parametrize(
    ("sizes", "fractions"),
    [
        ((100, 6), (3.0, 1.0)),
        ((10, 5), (0.75, 0.25)),
        ((40, 40), (0.9, 0.1)),
        ((7, 50, 21), (1.0, 2.0, 1.0)),
        ((7, 50, 21), (None, None, None)),
    ],
)
def test_an_epoch_is_trls_mixture(
    sizes: tuple[int, ...], fractions: tuple[float | None, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {f"{tmp_path}/{name}.jsonl": [f"{name}{i}" for i in range(n)] for name, n in zip("abc", sizes, strict=False)}
    for path, prompts in rows.items():
        Path(path).write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))

    def load_dataset(path: str, **_kwargs: object) -> Any:
        return datasets.Dataset.from_list([{"prompt": prompt} for prompt in rows[path]])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    entries = [(path, fraction) for path, fraction in zip(rows, fractions, strict=True)]
    one = importlib.import_module("trl.scripts.utils").DatasetConfig
    mixed = trl.DatasetMixtureConfig(datasets=[one(path=path, fraction=fraction) for path, fraction in entries])
    theirs: list[str] = list(trl.get_dataset(mixed)["train"]["prompt"])
    ours_config = RunConfig.model_validate(
        {"model": "m", "reward_funcs": ["f:g"], "datasets": [{"path": p, "fraction": f} for p, f in entries]}
    )
    dataset = open_dataset(ours_config)
    ours = [str(dataset.row_at(n).prompt) for n in range(len(dataset))]
    # TRL rounds the length of each data set's share, we round the total length.
    assert abs(len(ours) - len(theirs)) <= 1
    counts, expected = Counter(prompt[0] for prompt in ours), Counter(prompt[0] for prompt in theirs)
    assert all(abs(counts[name] - expected[name]) <= 1 for name in expected)
    if fractions[0] is None:
        assert sorted(ours) == sorted(theirs)
