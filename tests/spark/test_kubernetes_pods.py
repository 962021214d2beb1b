"""The application of examples/kubernetes/sparkapplication.yaml: its pods run in namespaces, with what Spark and the
operator give them.

tests/harness/spark_pods.py says in what they differ from those of a cluster."""

import pytest

from tests.harness.cluster_image import JOB, cluster_image, finished
from tests.harness.limits import scaled
from tests.harness.spark_pods import SparkPods, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def test_application_has_two_ranks_in_each_of_two_executors():
    """The driver asks the API server for the executors' pods, and for their end."""
    with (
        cluster_image("spark", 185) as image,
        SparkPods(image, {"/workspace/train.py": JOB}) as application,
    ):
        driver = application.start_driver()
        status, text = driver.wait(scaled(100))
        executors = application.executors
        report = text + "".join(f"{pod.name}:\n{pod.text}" for pod in executors)
        assert status == 0, report
        found = finished(text)
        assert [each[:4] for each in found] == [(rank, 4, rank // 2, 2) for rank in range(4)], text
        assert found[0][4] == found[1][4] != found[2][4] == found[3][4], text
        assert {each[4] for each in found} == {pod.name for pod in executors}, text
        assert len({pod.address for pod in [driver, *executors]}) == 3
        assert not any(pod.is_running for pod in executors)
