"""A part of PyTorch's own tests of its backends, on two ranks. ``make test-c10d`` runs all of them, also on Gloo."""

import pytest

from tests.harness import ROOT
from tests.harness.pytorch_suite import FOLDER, differences, run

CASES = (
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_full_group_sum",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo_tags",
    "test_destroy_full_group",
    "test_gather_checks",
    "test_get_future",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_scatter_object_list",
    "test_send_recv_any_source_torch_profiler",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
)
CASES_WITHOUT_GLOO = (
    *differences(),
    "test_DistributedDataParallelCPU",
    "test_all_reduce_sum_async",
    "test_scatter_checks",
    "test_send_recv_any_source_torch_profiler",
)


def test_cases_pass_in_place_of_gloo():
    pytest.importorskip("expecttest")
    found, output = run(2, "horoplug in place of Gloo", CASES, seconds=120)
    assert {case: found.get(case) for case in CASES} == dict.fromkeys(CASES, "passes"), output


def test_cases_pass_under_the_name_horoplug():
    pytest.importorskip("expecttest")
    found, output = run(2, "horoplug", CASES_WITHOUT_GLOO, seconds=120)
    assert {case: found.get(case) for case in CASES_WITHOUT_GLOO} == dict.fromkeys(
        CASES_WITHOUT_GLOO, "passes"
    ), output


def test_guide_shows_the_table():
    rows = differences()
    assert rows
    assert differences((ROOT / "docs" / "torch-distributed.md").read_text()) == rows
    assert (FOLDER / "pytorch_suite.py").exists()
