"""Which test runs or checks which block of a page, where it is not test_blocks.py.

All Python, YAML and commands of some pages are run in order. On other pages, a block is named by a text in it.
test_blocks.py checks that each text is in one block, and that the test names its page.
"""

WHOLE_PAGES = {
    "docs/notebook.md": "tests/documentation/test_tutorial.py",
    "docs/reading-rollouts.md": "tests/documentation/test_tutorial.py",
    "docs/tutorial.md": "tests/documentation/test_tutorial.py",
}
OTHER_TESTS: dict[tuple[str, str], str] = {
    ("docs/coming-from-trl.md", "$ cat config.yaml"): "tests/headrace/test_run_file.py",
    ("docs/operations.md", "kind: Pod"): "tests/helm/test_commands_in_docs.py",
    ("docs/operations.md", "before=$(manifest)\ndocker"): "tests/helm/test_commands_in_docs.py",
    ("docs/operations.md", "before=$(manifest)\nkubectl"): "tests/helm/test_commands_in_docs.py",
    ("docs/operations.md", "kubectl -n rl exec restore -- sh"): "tests/helm/test_commands_in_docs.py",
    ("docs/python.md", "from datasets import load_dataset"): "tests/headrace/grpo/test_script.py",
    ("docs/python.md", "run_id = trainer"): "tests/headrace/grpo/test_script.py",
    ("docs/rewards.md", "/v1/score"): "tests/documentation/test_tutorial.py",
    (
        "docs/scoring-from-elsewhere.md",
        "async def headrace(",
    ): "tests/rewarder/score_api/test_scoring_from_elsewhere.py",
}
