"""Four ranks that share the GPU, as if on two hosts, reduce PyTorch tensors within each host first, by CUDA IPC."""

import pytest

from tests.gpu.device.device_jobs import gpu_pool as gpu_pool

torch = pytest.importorskip("torch")

import horoplug.torch as hvd  # noqa: E402


def check_allreduces():
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int16, torch.uint8):
        # The last size needs several windows.
        for count in (0, 1, 7, 10_001, 20_000_003):
            made = torch.Generator().manual_seed(hvd.rank())
            host = torch.randint(0, 5, (count,), generator=made).to(dtype)
            for op in (hvd.Sum, hvd.Average, hvd.Max):
                expected = hvd.allreduce(host, op=op)
                mine = host.to(device)
                assert hvd.allreduce_(mine, op=op) is mine
                assert torch.equal(mine.cpu(), expected), f"{dtype}, {count} elements"


def check_step(timeline):
    """Run an allreduce of which rank 0 writes a timeline."""
    hvd.start_timeline(str(timeline))
    tensor = torch.ones(1000, device="cuda")
    assert hvd.allreduce(tensor, op=hvd.Sum).tolist() == [hvd.size()] * 1000
    hvd.stop_timeline()


def test_hierarchical_allreduce_with_two_hosts_on_one_gpu(gpu_pool, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no CUDA device")
    env = {"HOROPLUG_ALGORITHM": "hierarchical", "HOROVOD_TIMELINE": "DYNAMIC"}
    with gpu_pool.ranks(4, hosts="aabb", env=env) as ranks:
        ranks.run(check_allreduces)
        ranks.run(check_step, tmp_path / "timeline.json")
    assert '"hierarchical"' in (tmp_path / "timeline.json").read_text()
