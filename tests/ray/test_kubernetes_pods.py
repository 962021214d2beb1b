"""The job of examples/kubernetes/rayjob.yaml: KubeRay's pods run in namespaces, with what the operator gives them.

tests/harness/ray_pods.py says in what they differ from KubeRay's."""

import pytest

from tests.harness.cluster_image import JOB, cluster_image, finished
from tests.harness.ray_pods import RayPods, why_not

# Not for this module: the cluster of the other modules of this folder remains for those that follow.
pytest_plugins = ["tests.harness.ray_driver"]
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="module")
def cluster():
    """The head and the workers of the manifest, on which Ray runs."""
    with cluster_image("ray", 1000) as image, RayPods(image, {"/workspace/train.py": JOB}) as made:
        made.start()
        yield made


def assert_trains_on_all_workers(cluster):
    """Run the entrypoint: there are two ranks in each of the two workers, and none in the head."""
    status, text = cluster.run_entrypoint()
    assert status == 0, text
    found = finished(text)
    assert [each[:4] for each in found] == [(rank, 4, rank // 2, 2) for rank in range(4)], text
    assert found[0][4] == found[1][4] != found[2][4] == found[3][4], text
    assert {each[4] for each in found} == {worker.name for worker in cluster.workers}, text


def test_job_has_two_ranks_in_each_of_two_pods(cluster):
    assert_trains_on_all_workers(cluster)


def test_object_store_of_a_worker_is_in_memory(cluster):
    """Ray prints a warning if /dev/shm is smaller than its share of the memory, and uses the disk."""
    for worker in cluster.workers:
        assert "instead of /dev/shm" not in worker.text


def test_job_runs_after_a_killed_worker_has_come_back(cluster):
    """The worker's successor has another name and another address."""
    lost = cluster.workers[0]
    cluster.pods.evict(lost)
    replacement = cluster.start_worker()
    cluster.wait_until_ready()
    cluster.wait_until_lost(lost)
    assert replacement.address != lost.address
    assert_trains_on_all_workers(cluster)
