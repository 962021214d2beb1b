import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

hvd.init()
tf.keras.utils.set_random_seed(7)
x = np.random.rand(64, 6).astype("float32")
y = (x.sum(1) > 3).astype("int64")

model = tf.keras.Sequential(
    [
        tf.keras.layers.Dense(8, activation="relu"),
        tf.keras.layers.Dense(2, activation="softmax"),
    ]
)
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
