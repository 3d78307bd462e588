"""Lines of code are counted without what is not code."""

from __future__ import annotations

from tools.size import by_part, code_lines, part_of, table

SOURCE = '''"""What the module is."""

# a comment
x = 1  # one

"""What x is."""


def f(
    a,
):
    """Return
    a."""
    return """
    text that is code"""
'''


def test_blank_lines_comments_and_docstrings_are_no_code() -> None:
    assert code_lines(SOURCE) == 1 + 3 + 2
    assert code_lines("") == 0


def test_parts_are_rooms_and_folders() -> None:
    assert part_of("refattn/mechanisms/softmax/layer/block.py") == "refattn/mechanisms/softmax"
    assert part_of("refattn/mechanisms/record.py") == "refattn/mechanisms"
    assert part_of("refattn/verify/report/texts.py") == "refattn/verify"
    assert by_part({"refattn/xp.py": 3, "refattn/tree.py": 4}) == {"refattn": 7}


def test_a_table_tells_totals_and_changes() -> None:
    rows = table({"refattn/cli": 10, "tests/cli": 4}, {"refattn/cli": 12, "tests/cli": 4, "refattn/show": 7})
    assert rows[0].split() == ["refattn/cli", "10", "-2"] and rows[1].split() == ["refattn/show", "0", "-7"]
    assert rows[-3].split() == ["refattn", "with", "backends", "10", "-9"] and rows[-2].split() == ["tests", "4"]
