import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
tf.random.set_seed(7)
images = tf.random.uniform([128, 6, 6, 1])
labels = tf.cast(tf.reduce_sum(images, [1, 2, 3]) > 18, tf.int64)
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().shuffle(64).batch(8)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(4, [3, 3], activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(2, activation="softmax"),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy()
lr = 0.001
optimizer = tf.optimizers.Adam(lr * hvd.size())


@tf.function
def training_step(images, labels):
    with tf.GradientTape() as tape:
        value = loss(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905
    return value


@hvd.elastic.run
def train(state):
    start = state.batch
    for batch, (images, labels) in enumerate(dataset.take(30 - start)):
        state.batch = start + batch
        training_step(images, labels)
        if state.batch % 5 == 0:
            state.commit()


def on_state_reset():
    optimizer.learning_rate.assign(lr * hvd.size())


state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
print("result", hvd.size(), state.batch, sum(float(tf.reduce_sum(v)) for v in model.variables))
