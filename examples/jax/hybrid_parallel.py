"""Train a network with tensor and data parallelism on a 2 x 2 grid of processes.

    horovodrun -np 4 python examples/jax/hybrid_parallel.py

JAX's AbstractMesh names the axes of the grid, and PartitionSpecs say how parameters and batches are divided, as in
programs for many devices of one process. Each axis is a process set of horoplug. Along the axis "tensor", each process
has half of the columns of the first layer and half of the rows of the second one; along the axis "data", half of the
batch. The program prints how far the result is from that of one process that trains alone.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import horoplug.jax as hvd

INPUTS, HIDDEN, OUTPUTS, BATCH = 16, 32, 4, 24
MESH = AbstractMesh((2, 2), ("data", "tensor"))
SPECS = {"w1": P(None, "tensor"), "b1": P("tensor"), "w2": P("tensor", None), "b2": P()}


class Grid:
    """The place of this process in a mesh, and the process set of each axis: the processes that differ from this one
    along that axis only."""

    def __init__(self, mesh: AbstractMesh) -> None:
        ranks = np.arange(hvd.size()).reshape(mesh.axis_sizes)
        self.sizes = dict(mesh.shape)
        place = np.argwhere(ranks == hvd.rank())[0].tolist()
        self.place = dict(zip(mesh.axis_names, place, strict=True))
        self.sets: dict[str, hvd.ProcessSet] = {}
        for axis, name in enumerate(mesh.axis_names):
            for line in np.moveaxis(ranks, axis, -1).reshape(-1, mesh.axis_sizes[axis]).tolist():
                made = hvd.add_process_set(line)  # every process adds all sets, in the same order
                if made.included():
                    self.sets[name] = made

    def part(self, array: Any, spec: P) -> Any:
        """This process's part of a whole array."""
        for dimension, name in enumerate(spec):
            if name is not None:
                array = jnp.split(array, self.sizes[name], dimension)[self.place[name]]
        return array

    def whole(self, array: Any, spec: P) -> Any:
        """The whole array of which every process has a part."""
        for dimension, name in enumerate(spec):
            if name is not None:
                rows = jnp.moveaxis(array, dimension, 0)
                rows = hvd.allgather(rows, process_set=self.sets[name])
                array = jnp.moveaxis(rows, 0, dimension)
        return array


def parallel_region(
    process_set: hvd.ProcessSet,
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """The functions at the beginning and the end of the computation that a process set divides. Each process computes a
    part of the sum, so its derivatives by the inputs are parts of a sum as well."""
    total = partial(hvd.allreduce, op=hvd.Sum, process_set=process_set)

    @jax.custom_vjp
    def enter(x: Any) -> Any:
        return x

    enter.defvjp(lambda x: (x, None), lambda _, gradient: (total(gradient),))

    @jax.custom_vjp
    def leave(x: Any) -> Any:
        return total(x)

    leave.defvjp(lambda x: (total(x), None), lambda _, gradient: (gradient,))
    return enter, leave


def network() -> dict[str, Any]:
    one, two = jax.random.split(jax.random.key(1))
    return {
        "w1": jax.random.normal(one, (INPUTS, HIDDEN)) / 4,
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(two, (HIDDEN, OUTPUTS)) / 6,
        "b2": jnp.zeros(OUTPUTS),
    }


def train(steps: int, grid: Grid | None) -> dict[str, Any]:
    """Train on the grid, or alone. Returns the whole parameters."""
    enter = leave = lambda x: x
    params, optimizer = network(), optax.adam(0.01)
    if grid is not None:
        enter, leave = parallel_region(grid.sets["tensor"])
        params = {name: grid.part(value, SPECS[name]) for name, value in params.items()}
        optimizer = hvd.DistributedOptimizer(optimizer, process_set=grid.sets["data"])

    def loss(params: dict[str, Any], inputs: Any, targets: Any) -> Any:
        hidden = jnp.tanh(enter(inputs) @ params["w1"] + params["b1"])
        outputs = leave(hidden @ params["w2"]) + params["b2"]
        return jnp.mean((outputs - targets) ** 2)

    @jax.jit
    def step(params: Any, state: Any, inputs: Any, targets: Any) -> Any:
        gradients = jax.grad(loss)(params, inputs, targets)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for inputs in jax.random.normal(jax.random.key(2), (steps, BATCH, INPUTS)):
        mine = inputs if grid is None else grid.part(inputs, P("data"))
        params, state = step(params, state, mine, jnp.sin(mine[:, :OUTPUTS]))
    if grid is None:
        return params
    return {name: grid.whole(value, SPECS[name]) for name, value in params.items()}


def difference(steps: int) -> float:
    """Train on the grid and alone. Returns the largest difference between two parameters."""
    together, alone = train(steps, Grid(MESH)), train(steps, None)
    return max(float(abs(together[name] - value).max()) for name, value in alone.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    hvd.init()
    if hvd.size() != MESH.size:
        raise SystemExit(f"The grid has {MESH.size} processes: horovodrun -np {MESH.size} ...")
    found = difference(arguments.steps)
    if hvd.rank() == 0:
        print(f"largest difference to one process after {arguments.steps} steps: {found:.1e}")


if __name__ == "__main__":
    main()
