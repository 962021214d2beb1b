"""Elastic jobs of each framework: processes fail, others replace them, and the training gets the result that it gets
without failures."""

import importlib.util
import random
import re

import pytest

from tests.harness.elastic_launcher import PRELOADS
from tests.harness.elastic_training import (
    MOMENTS,
    check,
    check_faults,
    launch,
    plan,
    some_faults,
)
from tests.harness.keras_jobs import QUIET
from tests.harness.support import QUICK_XLA, seed


def needs(name):
    """Skip a test if a framework is not installed. It is not imported here, since it may start threads."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")


# ---- PyTorch ---------------------------------------------------------------------------------------------------------

TORCH = """
import hashlib
import torch
import horoplug.torch as hvd
from tests.harness.elastic_training import Faults, train

class Momentum(torch.optim.SGD):
    def step(self, *args):
        faults.at("update", state.step)
        super().step(*args)

def make(kind):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return model, kind(model.parameters(), lr=0.05, momentum=0.9)

def loss(model, step):
    x = torch.sin(torch.arange(32.0).view(4, 8) * (step + 1))  # the same on all ranks
    return (model(x) - x.sum(1, keepdim=True)).square().mean()

def one_step(state):
    optimizer.zero_grad()
    value = loss(model, state.step)
    faults.at("backward", state.step)
    value.backward()
    optimizer.step()
    # Unnamed operations of survivors and of their replacements belong together.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()

hvd.init()
faults = Faults(hvd)
model, optimizer = make(Momentum)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)
train(hvd, faults, state, one_step)

reference, alone = make(torch.optim.SGD)
for step in range(state.step):
    alone.zero_grad()
    loss(reference, step).backward()
    alone.step()
found, expected = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, reference))
momenta = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
bits = b"".join(t.detach().numpy().tobytes() for t in [*model.parameters(), *momenta])
faults.end(state.step, hashlib.sha256(bits).hexdigest(), torch.allclose(found, expected, atol=1e-4))
"""


@pytest.mark.short(failure=True)
def test_torch_training_survives_each_kind_of_failure(tmp_path):
    """One process after the other fails, rank 0 included; survivors go on, and a replacement joins them."""
    key = seed()
    faults = some_faults(key, 3, ["SIGKILL", "exit", "exception", "SIGSTOP", "memory", "SIGKILL"])
    faults[-1]["ranks"] = [0]
    launch(3, 2, TORCH, plan(tmp_path, 3, faults), preload=PRELOADS["torch"])
    check(tmp_path)


def test_torch_job_survives_failures_of_several_processes_and_failures_during_recovery(tmp_path):
    """Two processes are killed in the same instant; one in a reset callback and one in ``sync``, both while the job
    recovers; and all processes, so that the program begins again. Replacements create an optimizer with groups of
    parameters while the other processes train."""
    draw = random.Random(seed())
    kill = {"how": "SIGKILL", "step": 0}
    faults = [
        {**kill, "ranks": draw.sample(range(4), 2), "moment": draw.choice(MOMENTS), "step": 2},
        {**kill, "ranks": [draw.randrange(4)], "moment": "backward"},
        {**kill, "ranks": [draw.randrange(3)], "moment": "reset"},
        {**kill, "ranks": [draw.randrange(4)], "moment": "commit"},
        {**kill, "ranks": [draw.randrange(3)], "moment": "sync"},
        {**kill, "ranks": draw.sample(range(4), 4), "moment": draw.choice(MOMENTS)},
    ]
    program = TORCH.replace("model.named_parameters())", "model.named_parameters(), groups=2)", 1)
    assert program != TORCH
    launch(4, 2, program, plan(tmp_path, 4, faults), preload=PRELOADS["torch"])
    by_rank = check(tmp_path)
    assert min(end["process"] for end in by_rank) >= 4  # none of the first processes


DIES_IN_INIT = """
from horoplug.common import context
start = context.start_engine

def start_or_die(config, *args):
    faults.at("init", 0, config.rank)
    return start(config, *args)

context.start_engine = start_or_die
"""


def test_survivor_goes_on_when_another_process_dies_between_connecting_and_its_first_operation(
    tmp_path,
):
    kill = {"how": "SIGKILL", "ranks": [1]}
    faults = [{**kill, "moment": "backward", "step": 2}, {**kill, "moment": "init", "step": 0}]
    before = "train(hvd, faults, state, one_step)"
    launch(
        3,
        2,
        TORCH.replace(before, DIES_IN_INIT + before),
        plan(tmp_path, 3, faults),
        preload=PRELOADS["torch"],
    )
    check(tmp_path)


SAMPLER = """
import hashlib
import torch
import horoplug.torch as hvd
from tests.harness.elastic_training import Faults

hvd.init()
faults = Faults(hvd)
data = torch.arange(1000)
sampler = hvd.elastic.ElasticSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler)
# What the committed training has seen: (epoch, samples of all ranks in the order of the sampler) of each step.
state = hvd.elastic.TorchState(sampler=sampler, epoch=0, step=0, seen=[])
faults.watch(state)

@hvd.elastic.run
def run(state):
    taken = 0
    while hvd.broadcast_object(state.epoch < 2 or not faults.are_over, 0):
        for batch, samples in enumerate(loader):
            faults.at("backward", state.step)
            of_all = hvd.allgather_object(samples.tolist())
            faults.at("update", state.step)
            rows = zip(*of_all, strict=True)
            state.seen.append((state.epoch, [sample for row in rows for sample in row]))
            state.sampler.record_batch(batch, len(samples))
            state.step += 1
            state.commit()
            taken += 1
            if taken == 3:
                faults.wait_for_all(state)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)

run(state)
bits = hashlib.sha256(repr(state.seen).encode()).hexdigest()
faults.end(state.step, bits, True, seen=state.seen)
"""


@pytest.mark.short
def test_elastic_sampler_deals_each_sample_once_in_committed_training(tmp_path):
    """The last batches of 1000 samples are smaller. A sample is repeated only to fill the last batch of an epoch."""
    key = seed()
    faults = some_faults(key, 3, ["SIGKILL"] * 3)
    faults[-1]["step"] = 10 + key % 3  # near the end of an epoch of 11 steps
    launch(3, 2, SAMPLER, plan(tmp_path, 3, faults), preload=PRELOADS["torch"])
    by_rank = check(tmp_path)
    seen: dict[int, list[int]] = {}
    for epoch, samples in by_rank[0]["seen"]:
        seen.setdefault(epoch, []).extend(samples)
    assert len(seen) >= 2
    for samples in seen.values():
        assert sorted(samples[:1000]) == list(range(1000))
        assert len(samples) - 1000 < 3


# ---- TensorFlow ------------------------------------------------------------------------------------------------------

TENSORFLOW = """
import hashlib
import numpy as np
import tensorflow as tf
import horoplug.tensorflow as hvd
from tests.harness.elastic_training import Faults, train

def make():
    draw = np.random.default_rng(1)
    parameters = [tf.Variable(draw.normal(size=n).astype("float32")) for n in ((8, 16), (16, 1))]
    return parameters, [tf.Variable(tf.zeros_like(p)) for p in parameters]

def gradients(parameters, step, wrap):
    with tf.GradientTape() as tape:
        x = tf.sin(tf.reshape(tf.range(32.0), [4, 8]) * tf.cast(step + 1, tf.float32))
        y = tf.tanh(x @ parameters[0]) @ parameters[1]
        loss = tf.reduce_mean((y - tf.reduce_sum(x, 1, keepdims=True)) ** 2)
    return wrap(tape).gradient(loss, parameters)

def update(parameters, momenta, gradients):
    for p, m, g in zip(parameters, momenta, gradients):
        m.assign(0.9 * m + g)
        p.assign_sub(0.02 * m)

hvd.init()
faults = Faults(hvd)
parameters, momenta = make()
compiled = tf.function(lambda step: gradients(parameters, step, hvd.DistributedGradientTape))

def one_step(state):
    faults.at("backward", state.step)
    reduced = compiled(tf.constant(state.step))
    faults.at("update", state.step)
    update(parameters, momenta, reduced)
    # Unnamed operations of survivors and of their replacements belong together.
    assert hvd.allreduce(tf.ones(1), op=hvd.Sum) == hvd.size()

state = hvd.elastic.TensorFlowState([*parameters, *momenta], step=0)
train(hvd, faults, state, one_step)

reference, alone = make()
again = tf.function(lambda step: gradients(reference, step, lambda tape: tape))
for step in range(state.step):
    update(reference, alone, again(tf.constant(step)))
close = all(np.allclose(p, q, atol=1e-3) for p, q in zip(parameters, reference))
bits = b"".join(v.numpy().tobytes() for v in [*parameters, *momenta])
faults.end(state.step, hashlib.sha256(bits).hexdigest(), close)
"""


def test_tensorflow_training_survives_failures(tmp_path):
    needs("tensorflow")
    faults = some_faults(seed(), 3, ["SIGKILL"])
    launch(3, 2, TENSORFLOW, plan(tmp_path, 3, faults, **QUIET), preload=PRELOADS["tensorflow"])
    check(tmp_path)


# ---- JAX -------------------------------------------------------------------------------------------------------------

JAX = """
import hashlib
import jax, jax.numpy as jnp, numpy as np
import horoplug.jax as hvd
from tests.harness.elastic_training import Faults, train

def make():
    draw = np.random.default_rng(1)
    params = {name: draw.normal(size=n).astype("float32") for name, n in (("a", (8, 16)), ("b", (16, 1)))}
    return params, jax.tree.map(np.zeros_like, params)

def loss(params, step):
    x = jnp.sin(jnp.arange(32.0).reshape(4, 8) * (step + 1))
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - x.sum(1, keepdims=True)) ** 2)

def update(params, momenta, step):
    grads = hvd.allreduce(jax.grad(loss)(params, step))
    momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, grads)
    return jax.tree.map(lambda p, m: p - 0.02 * m, params, momenta), momenta

compiled = jax.jit(update, donate_argnums=(0, 1))

def one_step(state):
    faults.at("backward", state.step)
    params, momenta = compiled(state.params, state.momenta, state.step)
    faults.at("update", state.step)
    state.params, state.momenta = params, momenta
    # Unnamed operations of survivors and of their replacements belong together.
    assert hvd.allreduce(jnp.ones(1), op=hvd.Sum) == hvd.size()

hvd.init()
faults = Faults(hvd)
params, momenta = jax.tree.map(jnp.asarray, make())
state = hvd.elastic.JaxState(params=params, momenta=momenta, step=0)
train(hvd, faults, state, one_step)

# The reference is computed by NumPy, which has nothing to compile.
params, momenta = make()
for step in range(state.step):
    x = np.sin(np.arange(32, dtype="float32").reshape(4, 8) * (step + 1))
    hidden = np.tanh(x @ params["a"])
    error = (hidden @ params["b"] - x.sum(1, keepdims=True)) / 2  # the derivative of the mean of 4 squares
    grads = {"a": x.T @ (error @ params["b"].T * (1 - hidden**2)), "b": hidden.T @ error}
    momenta = {name: 0.9 * momenta[name] + grads[name] for name in params}
    params = {name: params[name] - 0.02 * momenta[name] for name in params}
close = all(np.allclose(state.params[name], params[name], atol=1e-3) for name in params)
leaves = jax.tree.leaves((state.params, state.momenta))
bits = b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
faults.end(state.step, hashlib.sha256(bits).hexdigest(), close)
"""


def test_jax_training_survives_failures(tmp_path):
    needs("jax")
    faults = some_faults(seed(), 3, ["SIGKILL", "exception"])
    launch(3, 2, JAX, plan(tmp_path, 3, faults, **QUICK_XLA), preload=PRELOADS["jax"])
    check(tmp_path)


# ---- Keras, under Horovod's name -------------------------------------------------------------------------------------

KERAS = """
import hashlib
import keras, numpy as np
import horovod.keras as hvd
from tests.harness.elastic_training import Faults

BATCHES, EPOCHS = 6, 3
x = np.sin(np.arange(32.0)).reshape(4, 8).astype("float32")
x, y = np.tile(x, (BATCHES, 1)), np.tile(x.sum(1, keepdims=True), (BATCHES, 1))  # equal batches

def make(wrap):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(wrap(keras.optimizers.SGD(0.05, momentum=0.9)), loss="mse")
    return model

class Step(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        faults.at("backward", state.step)

    def on_train_batch_end(self, batch, logs=None):
        faults.at("update", state.step)
        state.step += 1

class Wait(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch >= 2:
            faults.wait_for_all(state)

hvd.init()
faults = Faults(hvd)
model = make(hvd.DistributedOptimizer)
state = hvd.elastic.KerasState(model, batch=0, epoch=0, step=0)
faults.watch(state)

@hvd.elastic.run
def train(state):
    callbacks = [
        Step(),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state),
        Wait(),
    ]
    options = {"batch_size": 4, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    state.model.fit(x, y, initial_epoch=state.epoch, callbacks=callbacks, **options)

train(state)
reference = make(lambda optimizer: optimizer)
reference.fit(x[:4], y[:4], batch_size=4, epochs=state.step, verbose=0)
pairs = zip(model.get_weights(), reference.get_weights())
close = all(np.allclose(a, b, atol=1e-3) for a, b in pairs)
variables = [*model.variables, *model.optimizer.variables]
bits = b"".join(np.asarray(keras.ops.convert_to_numpy(v)).tobytes() for v in variables)
faults.end(state.step, hashlib.sha256(bits).hexdigest(), close and state.epoch == EPOCHS)
"""


@pytest.mark.parametrize(
    "backend", ["tensorflow", pytest.param("torch", marks=pytest.mark.matrix), "jax"]
)
def test_keras_training_survives_a_failure(backend, tmp_path):
    needs(backend)
    needs("keras")
    faults = some_faults(seed(), 3, ["SIGKILL"])
    env = plan(tmp_path, 3, faults, KERAS_BACKEND=backend, **QUIET, **QUICK_XLA)
    launch(3, 2, KERAS, env, flags=["--compat"], preload=PRELOADS["keras"])
    check(tmp_path)


# ---- programs that were written for Horovod --------------------------------------------------------------------------

HOROVOD_TORCH = """
import argparse
import torch
import torch.nn.functional as F
import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
images = torch.rand(96, 1, 6, 6)
dataset = torch.utils.data.TensorDataset(images, (images.sum((1, 2, 3)) > 18).long())
sampler = hvd.elastic.ElasticSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.fc = torch.nn.Linear(64, 2)

    def forward(self, x):
        return F.log_softmax(self.fc(F.relu(self.conv(x)).flatten(1)), dim=1)

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.001 * hvd.size())
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.none,
    op=hvd.Average,
)

@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, args.epochs):
        state.model.train()
        for batch_idx, (data, target) in enumerate(loader):
            state.optimizer.zero_grad()
            loss = F.nll_loss(state.model(data), target)
            loss.backward()
            state.optimizer.step()
            state.batch = batch_idx
            state.sampler.record_batch(batch_idx, len(data))
            if batch_idx % 2 == 0:
                state.commit()
        state.sampler.set_epoch(state.epoch + 1)
        state.commit()

def on_state_reset():
    for group in state.optimizer.param_groups:
        group["lr"] = 0.001 * hvd.size()

state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
print("result", hvd.size(), state.epoch, sum(p.double().sum().item() for p in model.parameters()))
"""

HOROVOD_TENSORFLOW = """
import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()
tf.random.set_seed(7)
images = tf.random.uniform([128, 6, 6, 1])
labels = tf.cast(tf.reduce_sum(images, [1, 2, 3]) > 18, tf.int64)
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().shuffle(64).batch(8)

model = tf.keras.Sequential([
    tf.keras.layers.Conv2D(4, [3, 3], activation="relu"),
    tf.keras.layers.Flatten(),
    tf.keras.layers.Dense(2, activation="softmax"),
])
loss = tf.losses.SparseCategoricalCrossentropy()
lr = 0.001
optimizer = tf.optimizers.Adam(lr * hvd.size())

@tf.function
def training_step(images, labels):
    with tf.GradientTape() as tape:
        value = loss(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return value

@hvd.elastic.run
def train(state):
    start = state.batch
    for batch, (images, labels) in enumerate(dataset.take(30 - start)):
        state.batch = start + batch
        value = training_step(images, labels)
        if state.batch % 5 == 0:
            state.commit()

def on_state_reset():
    optimizer.learning_rate.assign(lr * hvd.size())

state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
print("result", hvd.size(), state.batch, sum(float(tf.reduce_sum(v)) for v in model.variables))
"""

HOROVOD_TENSORFLOW_KERAS = """
import numpy as np
import tensorflow as tf
import horovod.tensorflow.keras as hvd

hvd.init()
tf.keras.utils.set_random_seed(7)
x = np.random.rand(64, 6).astype("float32")
y = (x.sum(1) > 3).astype("int64")

model = tf.keras.Sequential([
    tf.keras.layers.Dense(8, activation="relu"),
    tf.keras.layers.Dense(2, activation="softmax"),
])
lr = 0.001
opt = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(lr * hvd.size()))
model.compile(loss="sparse_categorical_crossentropy", optimizer=opt, metrics=["accuracy"])

def on_state_reset():
    state.model.optimizer.learning_rate.assign(lr * hvd.size())

state = hvd.elastic.KerasState(model, batch=0, epoch=0)
state.register_reset_callbacks([on_state_reset])
callbacks = [
    hvd.callbacks.MetricAverageCallback(),
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.CommitStateCallback(state, batches_per_commit=3),
]

@hvd.elastic.run
def train(state):
    state.model.fit(
        x,
        y,
        batch_size=8,
        steps_per_epoch=7 - state.batch // hvd.size(),
        epochs=4 - state.epoch,
        callbacks=callbacks,
        verbose=1 if hvd.rank() == 0 else 0,
    )

train(state)
total = sum(float(tf.reduce_sum(v)) for v in model.trainable_variables)
print("result", hvd.size(), state.epoch, total)
"""


@pytest.mark.parametrize(
    ("framework", "program"),
    [
        ("torch", HOROVOD_TORCH),
        ("tensorflow", HOROVOD_TENSORFLOW),
        ("tensorflow.keras", HOROVOD_TENSORFLOW_KERAS),
    ],
    ids=["torch", "tensorflow", "tensorflow.keras"],
)
def test_programs_for_horovod_run_unedited_and_survive_a_failure(framework, program, tmp_path):
    """The models of TensorFlow and Keras have no variables before their first step, so that those of a replacement are
    built by the state."""
    needs(framework.partition(".")[0])
    draw = random.Random(seed())
    fault = {
        "ranks": [draw.randrange(2)],
        "moment": "commit",
        "step": draw.randrange(1, 4),
        "how": "SIGKILL",
    }
    env = plan(tmp_path, 2, [fault], **QUIET)
    unedited = ["-m", "tests.harness.elastic_training"]
    output = launch(
        2,
        2,
        program,
        env,
        flags=["--compat"],
        run_by=unedited,
        preload=PRELOADS[framework.partition(".")[0]],
    )
    _, _, (victim,) = check_faults(tmp_path)
    results = dict(re.findall(r"^\[(\d+)\]<stdout>:result (.*)$", output, re.M))
    assert sorted(map(int, results)) == sorted({0, 1, 2} - {victim})
    assert len(set(results.values())) == 1
    assert next(iter(results.values())).startswith("2 ")
