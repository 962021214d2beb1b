"""The results of a job by rank, or the error of the process that has failed first, without a job."""

import pickle

import pytest

from horoplug.runner.ending.results import Failure, RankError, Results, failed_first

SENT = {
    0: "zero",
    1: tuple(Failure("ValueError: no data", "Traceback ...", pickle.dumps(ValueError("no data")))),
    2: "two",
}


def results(processes=(0, 2), returned=(0, 2), raised=(), problems=None, load=SENT.__getitem__):
    return Results(processes, set(returned), raised, problems or {}, load)


@pytest.mark.parametrize(
    ("blamed", "raised", "returned", "first"),
    [
        (None, [], [], None),
        (None, [2, 1], [], 2),
        (1, [2, 1], [], 2),  # process 2 has reported its exception before process 1 failed
        (1, [2], [1], 2),
        (1, [2], [], 1),  # process 1 has crashed, and process 2 failed because of it
        (1, [], [], 1),
    ],
)
@pytest.mark.short
def test_the_first_to_fail_is_the_first_to_report_unless_another_has_crashed(
    blamed, raised, returned, first
):
    assert failed_first(blamed, raised, returned) == first


@pytest.mark.short
def test_results_are_in_the_order_of_the_ranks():
    assert results((2, 0)).by_rank(0) == ["two", "zero"]


@pytest.mark.short
def test_an_exception_is_an_error_with_the_rank_the_traceback_and_the_cause():
    with pytest.raises(RankError, match=r"^rank 1: ValueError: no data\n\nTraceback") as caught:
        results((0, 1), [0], [1]).by_rank(1, "rank 1 exited with code 1", 1)
    assert (caught.value.rank, caught.value.traceback) == (1, "Traceback ...")
    assert repr(caught.value.__cause__) == "ValueError('no data')"


@pytest.mark.short
def test_a_process_that_was_replaced_is_only_reported_if_it_is_to_blame():
    with pytest.raises(RankError, match=r"^rank 1 was killed$") as caught:
        results((0, 2), [0], [1]).by_rank(137, "rank 1 was killed", 2)
    assert caught.value.rank == 1
    with pytest.raises(RankError, match=r"^process 1: ValueError: no data\nThe job has ended: why"):
        results((0, 2), [0], [1]).by_rank(1, "why", 1, "why")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"processes": ()}, "all processes ended before their function returned"),
        ({"returned": [0]}, "rank 1 ended before its function returned"),
        ({"problems": {2: "no space"}}, "rank 1: its result cannot be stored: no space"),
        ({"load": {0: "zero"}.__getitem__}, "rank 1: its result cannot be unpickled: 2"),
    ],
)
@pytest.mark.short
def test_missing_results_are_one_line(options, text):
    with pytest.raises(RankError) as caught:
        results(**options).by_rank(0)
    assert str(caught.value) == text
