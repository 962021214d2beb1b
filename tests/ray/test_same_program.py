"""The training example of PyTorch on Ray."""

from tests.harness.same_program import RANKS, as_script, assert_same_as_horovodrun

pytest_plugins = ["tests.harness.ray_driver"]


def test_training_gives_the_parameters_of_horovodrun(on_ray, tmp_path):
    def use(cluster, script, arguments):
        from horoplug.ray import RayExecutor

        settings = RayExecutor.create_settings(timeout_s=60)
        with RayExecutor(settings, num_workers=RANKS) as executor:
            executor.start()
            executor.run(as_script, [script, arguments])

    assert_same_as_horovodrun(tmp_path, lambda *training: on_ray(use, *training))
