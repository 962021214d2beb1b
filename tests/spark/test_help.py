"""``help`` of ``horoplug.spark``."""

import pytest

from tests.harness import help_pages

pytest_plugins = ["tests.harness.spark_cluster"]

PAGES = "horoplug.spark", "spark.md"


@pytest.fixture(scope="module", autouse=True)
def spark(local_spark):
    return local_spark


@pytest.mark.short
def test_help_says_all_that_it_has_to():
    help_pages.check_documentation(*PAGES)


@pytest.mark.short
def test_examples_of_help(tmp_path):
    help_pages.check_examples(tmp_path, *PAGES)
