"""Runs a program as it is, with stand-ins for what a machine without network and torchvision lacks.

    python -m tests.harness.upstream program.py [arguments]

The images of MNIST and ImageNet are random ones, torchvision's models are small, and Keras' ResNet50 is too. PyTorch's
writer for TensorBoard writes nothing. Training with Keras and TensorFlow is short: programs that train for thousands of
steps have no option for fewer."""

import bz2
import functools
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

IMAGES = 640
CLASSES = 10
# Of Keras and TensorFlow.
STEPS = 20
EPOCHS = 4


def images(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Grey images of 28 x 28 pixels and their labels. A bright row tells the label."""
    numbers = np.random.default_rng(0)
    labels = numbers.integers(0, CLASSES, count)
    pixels = numbers.integers(0, 64, (count, 28, 28), dtype=np.uint8)
    pixels[np.arange(count), 2 * labels] = 255
    return pixels, labels


def write_libsvm(path: Path, count: int) -> None:
    """Write ``count`` images as text in the format of LIBSVM, compressed, as the data sets of that library are."""
    with bz2.open(path, "wt") as file:
        for image, label in zip(*images(count), strict=True):
            pixels = image.ravel()
            bright = np.flatnonzero(pixels)
            values = " ".join(f"{place + 1}:{pixels[place]}" for place in bright)
            file.write(f"{label} {values}\n")


# ---- torchvision -----------------------------------------------------------------------------------------------------


class MNIST:
    """``torchvision.datasets.MNIST``."""

    def __init__(
        self, root: Any, train: bool = True, transform: Any = None, **options: Any
    ) -> None:
        self._images, self._labels = images(IMAGES if train else IMAGES // 4)
        self._transform = transform

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._transform(self._images[index]), int(self._labels[index])


class ImageFolder:
    """``torchvision.datasets.ImageFolder``, of 16 images."""

    def __init__(self, root: Any, transform: Any = None) -> None:
        self._transform = transform

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Any, int]:
        pixels = np.random.default_rng(index).integers(0, 256, (224, 224, 3), dtype=np.uint8)
        return self._transform(pixels), index


class Unchanged:
    """A transformation to the size that images have already."""

    def __init__(self, *options: Any) -> None:
        pass

    def __call__(self, image: Any) -> Any:
        return image


class Compose:
    """``torchvision.transforms.Compose``."""

    def __init__(self, transforms: list[Any]) -> None:
        self._transforms = transforms

    def __call__(self, value: Any) -> Any:
        for transform in self._transforms:
            value = transform(value)
        return value


class ToTensor:
    """``torchvision.transforms.ToTensor``."""

    def __call__(self, image: np.ndarray) -> Any:
        import torch

        pixels = torch.from_numpy(image).float().div(255)
        return pixels.permute(2, 0, 1) if pixels.ndim == 3 else pixels[None]


class Normalize:
    """``torchvision.transforms.Normalize``."""

    def __init__(self, mean: Any, std: Any) -> None:
        self._mean, self._std = mean[0], std[0]

    def __call__(self, tensor: Any) -> Any:
        return (tensor - self._mean) / self._std


def resnet50(**options: Any) -> Any:
    """A network with convolutions, batch normalisation and 1,000 classes, as ResNet-50 has."""
    import torch

    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 7, stride=4),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 1000),
    )


SIZES = ("CenterCrop", "RandomHorizontalFlip", "RandomResizedCrop", "Resize")


class SummaryWriter:
    """``torch.utils.tensorboard.SummaryWriter``."""

    def __init__(self, folder: str) -> None:
        pass

    def add_scalar(self, *scalar: Any) -> None:
        pass


def stand_in(name: str, **contents: Any) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(contents)
    return module


def replace_torchvision() -> None:
    stand_in(
        "torchvision",
        datasets=stand_in("torchvision.datasets", MNIST=MNIST, ImageFolder=ImageFolder),
        transforms=stand_in(
            "torchvision.transforms",
            Compose=Compose,
            ToTensor=ToTensor,
            Normalize=Normalize,
            **dict.fromkeys(SIZES, Unchanged),
        ),
        models=stand_in("torchvision.models", resnet50=resnet50),
    )


# ---- Keras -----------------------------------------------------------------------------------------------------------


def load_data(path: str = "mnist.npz") -> Any:
    """``keras.datasets.mnist.load_data``."""
    return images(IMAGES), images(IMAGES // 4)


def small_resnet50(keras: Any, weights: Any = None, **options: Any) -> Any:
    """``keras.applications.ResNet50``, but small. ``keras``: Keras 2 or 3."""
    return keras.Sequential(
        [
            keras.layers.InputLayer((224, 224, 3)),
            keras.layers.Conv2D(8, 7, strides=4, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(1000, activation="softmax"),
        ]
    )


def replace_keras_downloads() -> None:
    import keras
    import tensorflow as tf

    for package in keras, tf.keras:
        package.datasets.mnist.load_data = load_data
        package.applications.ResNet50 = functools.partial(small_resnet50, package)


def shorten_training() -> None:
    """``fit`` and loops over ``dataset.take`` do not train for longer than ``STEPS`` steps and ``EPOCHS`` epochs."""
    import tensorflow as tf

    fit, take = tf.keras.Model.fit, tf.data.Dataset.take

    def short_fit(model: Any, *args: Any, steps_per_epoch: int, epochs: int, **options: Any) -> Any:
        steps_per_epoch, epochs = min(steps_per_epoch, STEPS), min(epochs, EPOCHS)
        return fit(model, *args, steps_per_epoch=steps_per_epoch, epochs=epochs, **options)

    def short_take(dataset: Any, count: int, name: Any = None) -> Any:
        return take(dataset, min(count, STEPS), name)

    tf.keras.Model.fit, tf.data.Dataset.take = short_fit, short_take


def main(program: str, *arguments: str) -> None:
    with open(program) as file:
        text = file.read()
    if "torchvision" in text:
        replace_torchvision()
    if "tensorboard" in text:
        stand_in("torch.utils.tensorboard", SummaryWriter=SummaryWriter)
    if "keras" in text or "tensorflow" in text:
        replace_keras_downloads()
        shorten_training()
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
