"""The card of a model that a script trained has the script's names."""

from services.trainer.export.model_card import RunFacts, model_card


def test_functions_have_their_own_names_and_rows_in_memory_have_no_file() -> None:
    config = {
        "model": "org/model",
        "dataset_name": "/home/me/.headrace/inputs/data-0123456789ab.parquet",
        "reward_funcs": ["brevity_0123456789abcdef01234567:brevity", "mine:style"],
    }
    card = model_card(RunFacts(config), title="out")
    assert "* Data: rows of a script\n" in card
    assert "* Rewards: `brevity`, `mine:style`\n" in card
