"""The cost of starts: the least of several runs."""

from benchmarks.first_seconds import Start, least


def test_the_least_of_several_runs_counts() -> None:
    runs = [Start("", None, 0.5, 2.0, 90.0), Start("", None, 0.7, 1.0, 80.0)]
    found = least("serving", 1.0, runs)
    assert found == Start("serving", 1.0, 0.5, 1.0, 80.0)
    assert found.line == "serving: 0.500 s of processor time (at most 1 s), 1.00 s by the clock, 80 MB"


def test_a_command_that_ends_has_no_memory() -> None:
    assert least("import", None, [Start("", None, 0.1, 0.2)]).line == (
        "import: 0.100 s of processor time, 0.20 s by the clock"
    )
