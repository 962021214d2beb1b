"""``help`` of ``horoplug.ray``."""

import pytest

pytest_plugins = ["tests.harness.ray_driver"]


def check(cluster, name, *arguments):
    """Call a check in the process that has Ray."""
    from tests.harness import help_pages

    getattr(help_pages, name)(*arguments, "horoplug.ray", "ray.md")


@pytest.mark.short
def test_help_says_all_that_it_has_to(on_ray):
    on_ray(check, "check_documentation")


@pytest.mark.short
def test_examples_of_help(on_ray, tmp_path):
    on_ray(check, "check_examples", tmp_path)
