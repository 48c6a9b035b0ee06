"""Several data sets: shares, epochs, aligned columns. The reference counts row by row, the code computes directly."""

import itertools
import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from services.trainer.data.dataset import PromptDataset, open_dataset
from services.trainer.data.dataset_mixture import Mixture, Turn, mixture
from services.trainer.submit_checks.dataset_check import check_dataset
from shared.errors import UserError
from shared.run_options.data import DatasetSource
from shared.run_options.run_config import RunConfig

pytestmark = pytest.mark.unit

SHARES = [
    (1,),
    (1, 1),
    (7, 3),
    (1, 1, 1),
    (3, 2, 1),
    (1, 2, 4, 8),
    (1, 1000),
    (5, 1, 1, 1, 1, 1, 1, 1),
]


def of(*weights: int) -> Mixture:
    return Mixture([Fraction(weight, sum(weights)) for weight in weights])


def file(path: Path, count: int, **columns: object) -> str:
    path.write_text("".join(json.dumps({"prompt": f"{path.stem}{i}"} | columns) + "\n" for i in range(count)))
    return str(path)


def config(*entries: dict[str, Any], **settings: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"model": "m", "datasets": list(entries), "reward_funcs": ["accuracy_reward"], "shuffle_dataset": False}
        | settings
    )


def prompts(dataset: PromptDataset, count: int) -> list[str]:
    return [str(dataset.row_at(n).prompt) for n in range(count)]


@pytest.mark.parametrize("weights", SHARES)
def test_every_data_set_gives_its_prompts_one_after_the_other(weights: tuple[int, ...]) -> None:
    given = Counter[int]()
    for turn in map(of(*weights).turn, range(3000)):
        assert turn.number == given[turn.source]
        given[turn.source] += 1


@pytest.mark.parametrize("weights", SHARES)
def test_no_data_set_is_ever_far_from_its_share(weights: tuple[int, ...]) -> None:
    levels = (len(weights) - 1).bit_length()
    given = Counter[int]()
    worst = Fraction(0)
    for count, turn in enumerate(map(of(*weights).turn, range(3000)), start=1):
        given[turn.source] += 1
        behind = (abs(given[i] - count * Fraction(w, sum(weights))) for i, w in enumerate(weights))
        worst = max(worst, *behind)
    assert worst <= Fraction(levels, 2)


def test_two_data_sets_take_turns_as_evenly_as_seven_to_three_can() -> None:
    # Of the first n prompts, round(0.7 n) are from the first data set: 0.7, 1.4, 2.1, 2.8, 3.5, 4.2, 4.9, 5.6, 6.3, 7.
    counts = [1, 1, 2, 3, 4, 4, 5, 6, 6, 7]
    sources = [of(7, 3).turn(n).source for n in range(10)]
    assert list(itertools.accumulate(1 - source for source in sources)) == counts


def test_the_turn_of_a_number_in_the_millions_of_millions_is_known_at_once() -> None:
    # Of 3e15 prompts, a third is from the first data set; a third of 3e15 + 1 is rounded to the same number.
    assert of(1, 2).turn(3 * 10**15) == Turn(source=1, number=2 * 10**15)


def test_a_fraction_is_meant_as_it_is_written() -> None:
    sources = [DatasetSource(path="a", fraction=0.7), DatasetSource(path="b", fraction=0.3)]
    assert mixture(sources, [1, 1]).shares == (Fraction(7, 10), Fraction(3, 10))


def test_without_fractions_an_epoch_is_every_row_once(tmp_path: Path) -> None:
    names = [file(tmp_path / f"{name}.jsonl", count) for name, count in (("a", 5), ("b", 3), ("c", 13))]
    dataset = open_dataset(config(*({"path": name} for name in names)))
    assert len(dataset) == 21
    for epoch in range(3):
        seen = Counter(str(dataset.row_at(n).prompt) for n in range(epoch * 21, (epoch + 1) * 21))
        assert set(seen.values()) == {1}
        assert len(seen) == 21


def test_with_fractions_an_epoch_ends_where_a_data_set_would_begin_again(tmp_path: Path) -> None:
    large, small = file(tmp_path / "large.jsonl", 100), file(tmp_path / "small.jsonl", 6)
    dataset = open_dataset(config({"path": large, "fraction": 3.0}, {"path": small, "fraction": 1.0}))
    assert len(dataset) == 24  # 6 rows are a quarter of them
    seen = Counter(prompts(dataset, 24))
    assert set(seen.values()) == {1}
    assert sum(prompt.startswith("small") for prompt in seen) == 6
    assert prompts(dataset, 33)[24:].count("large18") == 1  # the next epoch continues the large data set where it was


def test_each_data_set_is_shuffled_in_its_own_epochs(tmp_path: Path) -> None:
    a, b = file(tmp_path / "a.jsonl", 8), file(tmp_path / "b.jsonl", 8)
    mixed = config({"path": a}, {"path": b}, shuffle_dataset=True)
    dataset, again = open_dataset(mixed), open_dataset(mixed)
    rows = prompts(dataset, 32)
    of_a, of_b = ([int(p[1:]) for p in rows if p.startswith(name)] for name in "ab")
    for order in (of_a, of_b):
        assert sorted(order[:8]) == sorted(order[8:]) == list(range(8))
        assert order[:8] != order[8:]
    assert of_a[:8] != of_b[:8]
    assert [again.row_at(n).prompt for n in reversed(range(32))] == rows[::-1]


def test_reward_functions_get_the_same_columns_from_every_data_set(tmp_path: Path) -> None:
    a = file(tmp_path / "a.jsonl", 1, answer="4", level=2)
    b = file(tmp_path / "b.jsonl", 1, solution="9")
    dataset = open_dataset(config({"path": a}, {"path": b}))
    assert [dataset.row_at(n).columns for n in range(2)] == [
        {"answer": "4", "level": 2, "solution": None, "source": a},
        {"answer": None, "level": None, "solution": "9", "source": b},
    ]


def test_a_data_column_named_source_is_unchanged(tmp_path: Path) -> None:
    a, b = file(tmp_path / "a.jsonl", 1, source="olympiad"), file(tmp_path / "b.jsonl", 1)
    dataset = open_dataset(config({"path": a}, {"path": b}))
    assert [dataset.row_at(n).columns for n in range(2)] == [{"source": "olympiad"}, {"source": None}]


def test_an_entry_may_rename_and_choose_columns_for_itself(tmp_path: Path) -> None:
    a = file(tmp_path / "a.jsonl", 1, answer="4", note="n")
    b = file(tmp_path / "b.jsonl", 1, final_answer="9", note="n")
    dataset = open_dataset(
        config(
            {"path": a},
            {"path": b, "rename_columns": {"final_answer": "gold"}, "columns": ["gold"]},
            rename_columns={"answer": "gold"},
        )
    )
    assert [dataset.row_at(n).columns for n in range(2)] == [
        {"gold": "4", "note": "n", "source": a},
        {"gold": "9", "note": None, "source": b},
    ]


def test_a_check_counts_each_data_set_by_itself(tmp_path: Path) -> None:
    a, b = file(tmp_path / "a.jsonl", 4), tmp_path / "b.jsonl"
    b.write_text('{"prompt": "b0"}\n{"text": "b1"}\n')
    summary = check_dataset(config({"path": a}, {"path": str(b)}))
    assert [(s.field, s.num_rows, s.num_bad, round(s.share, 3)) for s in summary.sources] == [
        ("datasets.0", 4, 0, 0.667),
        ("datasets.1", 2, 1, 0.333),
    ]
    assert summary.sources[1].first_bad.startswith(f"{b} line 2 has no column 'prompt'")


def test_a_missing_file_is_blamed_on_its_entry(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no file /nowhere/b.jsonl") as caught:
        open_dataset(config({"path": file(tmp_path / "a.jsonl", 1)}, {"path": "/nowhere/b.jsonl"}))
    assert caught.value.field == "datasets.1"
