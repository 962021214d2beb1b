"""torch.compile of programs that use torch.distributed: the results are those without a compiler.

``make test-integrations`` compares all programs and compilers with Gloo (tests/integrations/torch_compile.py)."""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from tests.harness import compiled_programs
from tests.harness.process_groups import process_groups

pytest_plugins = ["tests.harness.jobs"]

groups = process_groups("aa")


def compare(names, compiler):
    for name in names:
        program = getattr(compiled_programs, name)
        expected = compiled_programs.outcome(program, "")
        found = compiled_programs.outcome(program, compiler)
        assert isinstance(found, list), f"{name}: {found}"
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")


# Few of them, without Inductor, which calls a C++ compiler: it takes seconds to compile a program.
@pytest.mark.parametrize(
    ("compiler", "programs"), [("eager", ["static_graph", "calls"]), ("aot_eager", ["fsdp1"])]
)
def test_results_are_those_without_a_compiler(groups, compiler, programs):
    groups.run(compare, programs, compiler)


def in_one_graph():
    """A collective operation that PyTorch has in its graphs does not break a graph."""
    compiled = torch.compile(compiled_programs.in_graph, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2 * dist.get_world_size()] * 2


def test_functional_collectives_do_not_break_a_graph(groups):
    groups.run(in_one_graph)


def breaks_of_a_step(backend):
    """Of a step with DDP and an all_reduce of its loss: what breaks graphs, and the number of graphs."""
    torch._dynamo.reset()
    counters.clear()
    group = dist.new_group(backend=backend)
    model = DistributedDataParallel(compiled_programs.model(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    compiled = torch.compile(step, backend="eager")
    losses = [compiled(batch) for batch in compiled_programs.batches()]
    reasons = {text.split(" at 0x")[0]: number for text, number in counters["graph_break"].items()}
    found = reasons, counters["stats"]["unique_graphs"]
    dist.destroy_process_group(group)
    return found, losses


def compare_breaks():
    expected, losses = breaks_of_a_step("gloo")
    found, own_losses = breaks_of_a_step("horoplug")
    assert found == expected, f"{found}, on Gloo: {expected}"
    torch.testing.assert_close(own_losses, losses)


def test_graphs_of_a_step_break_as_on_gloo(groups):
    groups.run(compare_breaks, timeout=100)
