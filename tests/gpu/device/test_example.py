"""The training example learns the same on the GPU as on the CPU, alone and on two processes."""

import pytest

from tests.gpu.device.device_jobs import run_script

torch = pytest.importorskip("torch")

from tests.harness.train_example import TRAIN, summary, write_fashion_mnist  # noqa: E402


@pytest.mark.timeout(400)
@pytest.mark.parametrize("size", [1, 2])
def test_example_learns_the_same_on_gpu_and_cpu(tmp_path, size):
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no CUDA device")
    write_fashion_mnist(tmp_path)
    options = ["--epochs", "2", "--batch-size", str(16 // size), "--lr", str(0.05 / size)]
    runs = [
        run_script(
            TRAIN, "--data-dir", str(tmp_path), "--json", *options, *more, size=size, timeout=150
        )
        for more in ([], ["--gpu"])
    ]
    on_cpu, on_gpu = (summary(done)["epochs"] for done in runs)
    for here, there in zip(on_cpu, on_gpu, strict=True):
        assert there["loss"] == pytest.approx(here["loss"], rel=0.05)
        assert there["accuracy"] == pytest.approx(here["accuracy"], abs=0.02)
