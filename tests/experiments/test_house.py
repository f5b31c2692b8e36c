"""The script that counts lines, names and comments, on a package small enough to count by hand."""

from experiments.assurance import house

MODULE = '''# A licence,
# of two lines.
"""A docstring
of two lines."""

from os import path

__all__ = ["long", "Thing"]

# Why this is 3.
LIMIT = 3  # beside code: not a line of comment


def long(a, b, c, d, e, f, g, *, h):
    """One line."""

    def inner():
        return "a string"

    return inner


class Thing:
    def method(self, a, b, c, d, e, f, g):
        return path


def _hidden():
    pass
'''


def test_a_small_package_is_counted_as_by_hand(tmp_path):
    for name in ("__init__.py", "shown.py", "_hidden.py", "tests/more.py", "test_it.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(MODULE if name == "shown.py" else "def public():\n    pass\n", encoding="utf-8")
    found = house.measure(tmp_path)
    assert found["modules"] == 2  # shown and _hidden; tests do not count
    assert found["source_lines"] == 12 + 2 + 2
    assert (found["function_lines_median"], found["function_lines_max"]) == (2, 7)
    assert found["functions_with_8_arguments"] == 1  # self does not count
    assert (found["public_names"], found["exported_names"]) == (3, 2)
    assert found["docstring_lines_per_source_line"] == round(3 / 16, 2)
    assert found["comment_lines_per_1000"] == round(1000 / 16)


def test_a_round_is_traced_from_the_run_to_the_gradients():
    found = house.trace_round()
    assert found["files"] > 10
    assert found["calls"] > found["depth"] > 5
