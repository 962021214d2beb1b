"""Train a small convolutional network on Fashion-MNIST with any Keras backend, on one process or several.

    python examples/keras/train.py                                                # one process
    KERAS_BACKEND=torch horovodrun -np 2 python examples/keras/train.py           # two processes; also tensorflow, jax

The script is the same for all of them. Five lines, marked (1) to (5), make it distributed, and each process trains on
its share of the images. The data are Fashion-MNIST, from Debian's package dataset-fashion-mnist or from four files in
--data-dir. Without these files, the script uses the handwritten digits that come with scikit-learn.
"""

import argparse
import gzip
from pathlib import Path

import keras
import numpy as np

import horoplug.keras as hvd

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def read_idx(path: Path) -> np.ndarray:
    """Read an array of bytes from a gzipped IDX file, which consists of a magic number with the number of dimensions,
    the dimensions as big-endian int32, and the bytes."""
    content = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(content, ">i4", content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)


def load(folder: Path | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images (count, side, side, 1), float32 in 0..1, and their classes, for training and for testing."""
    if folder is None and DEBIAN.is_dir():
        folder = DEBIAN
    if folder is None:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise SystemExit(
                "No data: install Debian's dataset-fashion-mnist, pass the folder of its files with --data-dir, or "
                "install scikit-learn."
            ) from None
        found = load_digits()
        images, labels = found.images[..., None].astype("float32") / 16, found.target
        return images[360:], labels[360:], images[:360], labels[:360]
    parts = []
    for prefix in ("train", "t10k"):
        images = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")
        parts += [images[..., None].astype("float32") / 255]
        parts += [read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz").astype("int64")]
    return parts[0], parts[1], parts[2], parts[3]


def network(side: int) -> keras.Model:
    """Two convolutions and two dense layers; maps images (count, side, side, 1) to class scores (count, 10)."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((side, side, 1)),
            layers.Conv2D(8, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.GlobalMaxPooling2D(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=64, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.002, help="learning rate of one process")
    parser.add_argument("--max-samples", type=int, help="maximum number of training images")
    parser.add_argument("--data-dir", type=Path, help="folder with the files of (Fashion-)MNIST")
    parser.add_argument("--save", type=Path, help="file for the trained model, such as model.keras")
    args = parser.parse_args()

    hvd.init()  # (1)
    images, labels, test_images, test_labels = load(args.data_dir)
    # Each process takes every size-th image, and all processes take the same number.
    count = (args.max_samples or len(images)) // hvd.size() * hvd.size()
    mine = slice(hvd.rank(), count, hvd.size())

    model = network(images.shape[1])
    rate = args.lr * hvd.size()  # (2)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(rate))  # (3)
    model.compile(
        optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # (4)
        hvd.callbacks.MetricAverageCallback(),  # (5)
        hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=1),
    ]
    history = model.fit(
        images[mine],
        labels[mine],
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_data=(
            test_images[hvd.rank() :: hvd.size()],
            test_labels[hvd.rank() :: hvd.size()],
        ),
        callbacks=callbacks,
        verbose=0,
    ).history

    if hvd.rank() == 0:
        print(f"{hvd.size()} process(es), Keras {keras.__version__} on {keras.backend.backend()}")
        for epoch, (loss, accuracy) in enumerate(
            zip(history["loss"], history["val_accuracy"], strict=True), start=1
        ):
            print(f"epoch {epoch}: loss {loss:.4f}, test accuracy {accuracy:.1%}")
        if args.save:
            model.save(args.save)


if __name__ == "__main__":
    main()
