"""The comparison of records says what differs first: stage, part, line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.comparison import compare_folders, compare_records
from tests.golden.records import Record

BEFORE: Record = {
    "no limit: kernels": {"add": "__kernel\nreturn a + b;", "mul": "__kernel\nreturn a * b;"},
    "no limit: plan": {"weights 1 w": "release 3"},
}


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (BEFORE, []),
        (
            {**BEFORE, "no limit: kernels": {"add": "__kernel\nreturn a - b;", "mul": ""}},
            ["no limit: kernels: add (and 1 more of 2): line 2: 'return a + b;' became 'return a - b;'"],
        ),
        (
            {"no limit: kernels": {"add": BEFORE["no limit: kernels"]["add"]}},
            ["no limit: kernels: mul is only before", "no limit: plan: only before"],
        ),
        ({**BEFORE, "no limit: plan": {}}, ["no limit: plan: weights 1 w is only before"]),
        (
            {**BEFORE, "no limit: kernels": dict(reversed(BEFORE["no limit: kernels"].items()))},
            ["no limit: kernels: the same parts in another order"],
        ),
    ],
)
def test_each_stage_that_differs_has_a_sentence(after: Record, said: list[str]) -> None:
    assert list(compare_records(BEFORE, after)) == said


def test_a_record_that_only_one_folder_has_is_named(tmp_path: Path) -> None:
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
    (tmp_path / "old" / "gpt2 on pocl.json").write_text("{}")
    assert list(compare_folders(tmp_path / "old", tmp_path / "new")) == [f"gpt2 on pocl: no record in {tmp_path / 'new'}"]
