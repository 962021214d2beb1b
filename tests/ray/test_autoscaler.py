"""Jobs that ask Ray's autoscaler for nodes. The nodes are processes of this machine."""

import pytest

from tests.harness.ray_driver import RayDriver


@pytest.fixture
def on_growing_ray():
    """Calls a function in a process with a cluster of one node, which can grow to three. Each node has one CPU."""
    driver = RayDriver(grows_to=3)
    yield driver.call
    if driver.is_open:
        driver.close()


def _rank():
    import ray

    import horoplug.numpy as hvd

    hvd.init()
    return hvd.rank(), hvd.size(), ray.get_runtime_context().get_node_id()


def test_jobs_ask_the_autoscaler_for_the_nodes_that_they_need(on_growing_ray):
    def use(cluster):
        import ray

        from horoplug.ray import ElasticRayExecutor, RayExecutor

        nodes = [len(ray.nodes())]
        elastic = ElasticRayExecutor(
            ElasticRayExecutor.create_settings(
                min_np=2, max_np=2, timeout_s=60, elastic_timeout=60, autoscaling=True
            )
        )
        elastic.start()
        results = [elastic.run(_rank)]
        nodes.append(len(ray.nodes()))
        settings = RayExecutor.create_settings(
            timeout_s=60, placement_group_timeout_s=60, autoscaling=True
        )
        static = RayExecutor(settings, num_workers=3)
        static.start()
        results.append(static.run(_rank))
        nodes.append(len(ray.nodes()))
        static.shutdown()
        return nodes, results

    nodes, (elastic, static) = on_growing_ray(use)
    assert nodes == [1, 2, 3]
    assert [(rank, size) for rank, size, _ in elastic] == [(0, 2), (1, 2)]
    assert [(rank, size) for rank, size, _ in static] == [(0, 3), (1, 3), (2, 3)]
    assert len({node for _, _, node in static}) == 3
