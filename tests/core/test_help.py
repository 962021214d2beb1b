"""``help`` of the public names of ``horoplug``, and of those that all modules share."""

import pytest

from tests.harness import help_pages

pytest_plugins = ["tests.harness.jobs"]

PAGES = "horoplug", "index.md", "numpy.md"


@pytest.fixture(scope="module")
def ranks(pool):
    with pool.ranks(2, env={"HOROVOD_TIMELINE": "DYNAMIC"}) as job:
        yield job


@pytest.mark.short
def test_help_says_all_that_it_has_to(ranks):
    ranks.run(help_pages.check_documentation, *PAGES)


@pytest.mark.short
def test_examples_of_help(ranks, tmp_path):
    counts = ranks.run(help_pages.check_examples, tmp_path, *PAGES)
    assert counts == [len(help_pages.names_of_pages(PAGES[0], PAGES[1:]))] * 2


@pytest.mark.parametrize(
    ("example", "rank", "text"),
    [
        ("x = 1 + 1  # -> 2", 0, None),
        ("x = 1 + 1  # -> 3", 0, ": 2, and not 3"),
        ("[1.0]  # -> [1.0] on rank 0, [2.0, 3.0] on rank 1", 0, None),
        ("[1.0]  # -> [1.0] on rank 0, [2.0, 3.0] on rank 1", 1, r"\[1.0\], and not \[2.0, 3.0\]"),
        ("int('a')  # raises ValueError", 0, None),
        ("int('a')  # raises KeyError", 0, "raises ValueError, and not KeyError"),
        ("int('1')  # raises ValueError", 0, "does not raise ValueError"),
        ("def f():\n    return 1\n\nf()  # -> 2", 0, "1, and not 2"),
    ],
)
@pytest.mark.short
def test_wrong_examples_are_found(example, rank, text):
    if text is None:
        help_pages.run_example(example, {}, rank)
    else:
        with pytest.raises(AssertionError, match=text):
            help_pages.run_example(example, {}, rank)


def undocumented(tensor, timeout=0.0):
    """Returns a tensor.

    Example:

        1 + 1  # -> 2
    """


@pytest.mark.short
def test_incomplete_documentation_is_found():
    found = [text.partition(": ")[2] for text in help_pages.problems_of("f", undocumented)]
    assert found == [
        "does not describe the parameter timeout",
        "does not state the unit of the parameter timeout",
        "does not say what it raises",
        "does not mention shape|dimension",
        "does not mention dtype",
    ]
