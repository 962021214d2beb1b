"""SyncBatchNormalization, compared with plain batch normalisation on the batches of all ranks."""

import numpy as np
import pytest

from tests.harness.checks.tensorflow_sync_batch_norm import check_as_one_batch
from tests.harness.support import ranks_fixture, seed

tf = pytest.importorskip("tensorflow")
hvd = pytest.importorskip("horoplug.tensorflow")

pytest_plugins = ["tests.harness.jobs"]

ranks = ranks_fixture("a", "aab")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.short("aa*")
def test_sync_batch_norm_equals_batch_norm_on_one_batch(ranks, compiled):
    ranks.run(check_as_one_batch, seed() % 10000, compiled)


def check_plain_behaviour(folder):
    """Cases in which it behaves like the plain layer, and its use in a model."""
    size, rank = hvd.size(), hvd.rank()
    x = tf.random.normal([4, 3], mean=rank)
    plain, alone = tf.keras.layers.BatchNormalization(), None
    if size > 1:
        first = hvd.add_process_set([0])
        alone = hvd.SyncBatchNormalization(process_set=first)
        np.testing.assert_allclose(alone(x, training=True), plain(x, training=True), 1e-6)
        hvd.barrier()
        hvd.remove_process_set(first)
    layer = hvd.SyncBatchNormalization()
    np.testing.assert_allclose(layer(x), x, 1e-2, 1e-2)

    inputs = tf.keras.Input((3,))
    model = tf.keras.Model(inputs, hvd.SyncBatchNormalization(momentum=0.5, name="norm")(inputs))
    model.compile(tf.keras.optimizers.SGD(0.0), "mse")
    model.fit(x, x, batch_size=4, verbose=0)
    moving = hvd.allgather_object([v.numpy().tolist() for v in model.non_trainable_variables])
    assert all(each == moving[0] for each in moving)
    file = f"{folder}/{rank}.keras"
    model.save(file)
    loaded = tf.keras.models.load_model(file).get_layer("norm")
    assert isinstance(loaded, hvd.SyncBatchNormalization)
    assert loaded.momentum == 0.5
    with pytest.raises(ValueError, match="fused=True"):
        hvd.SyncBatchNormalization(fused=True)
    hvd.shutdown()
    try:
        with pytest.raises((ValueError, RuntimeError), match="not been initialized"):
            layer(x, training=True)
    finally:
        hvd.init()


def test_sync_batch_norm_acts_like_the_plain_layer_elsewhere(pool, tmp_path):
    with pool.ranks(2, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}) as job:
        job.run(check_plain_behaviour, str(tmp_path))
