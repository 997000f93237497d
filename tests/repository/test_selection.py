"""The sample of tests that a plain run takes."""

from __future__ import annotations

from collections import Counter

from tests.support.selection import SHARE, is_on, one_of_each_file, sample


def test_each_case_is_on_one_runtime_and_both_are_used() -> None:
    names = {f"t.py::test_a[{device}-{case}]" for device in ("pocl", "intel-cpu") for case in range(60)}
    chosen = sample(names)
    assert chosen < names and len(chosen) == -(-60 // SHARE)
    assert len({name.split("-")[-1] for name in chosen}) == len(chosen)
    assert set(Counter("pocl" in name for name in chosen)) == {True, False}


def test_no_test_is_left_out() -> None:
    names = [f"t.py::test_{test}[{device}]" for test in range(20) for device in ("pocl", "intel-cpu")]
    names += ["t.py::test_alone", "t.py::test_two[pocl-intel-cpu]", "test_pocl.py::test_both", "t.py::test_same[pocl-1-pocl]"]
    assert {name.split("[")[0] for name in sample(names)} == {name.split("[")[0] for name in names}


def test_the_sample_is_always_the_same() -> None:
    names = [f"t.py::test_a[{case}]" for case in range(10)]
    assert sample(names) == sample(reversed(names)) and len(sample(names)) == -(-10 // SHARE)


def test_a_driver_s_tests_are_those_with_its_name() -> None:
    of_it = ["t.py::test_a[pocl]", "t.py::test_a[3-pocl-buffer]", "t.py::test_a[buffer-pocl]"]
    others = ["t.py::test_a[pocl7]", "t.py::test_pocl", "test_pocl.py::test_a[x]", "t.py::test_a[x.pocl]", "pocl/t.py::test_a"]
    assert [name for name in (*of_it, *others) if is_on(name, "pocl")] == of_it


def test_a_driver_s_sample_has_one_test_of_each_file() -> None:
    names = [f"{file}.py::test_{test}[{case}]" for file in "abc" for test in "xyz" for case in range(3)]
    chosen = one_of_each_file(names)
    assert sorted(name[0] for name in chosen) == ["a", "b", "c"] and chosen == one_of_each_file(reversed(names))
