"""Train a small convolutional network on handwritten digits in mixed_float16, with plain fit.

    KERAS_BACKEND=jax python examples/keras_fit.py [EPOCHS]

Runs on every Keras backend that trains: tensorflow, jax and torch.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import polyamp.keras as amp


def digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    data = load_digits()
    images = (data.images[..., None] / 16.0).astype("float32")
    cut = len(images) * 4 // 5
    return (images[:cut], data.target[:cut]), (images[cut:], data.target[cut:])


def build() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.Activation("relu"),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10, activation="softmax"),
        ]
    )


def main(epochs: int = 5) -> None:
    keras.utils.set_random_seed(0)
    train, held = digits()
    model = build()
    amp.compile(
        model,
        keras.optimizers.Adam(1e-2, global_clipnorm=1.0),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        policy="fp16",  # mixed_float16, with the softmax and what comes out in float32
    )
    model.fit(*train, batch_size=64, epochs=epochs, callbacks=[amp.CheckScaling()], verbose=2)
    accuracy = model.evaluate(*held, return_dict=True, verbose=0)["accuracy"]

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "digits.keras"
        model.save(file)
        again = amp.load_model(file)  # optimizer, scale and counters as they were
    same = again.optimizer.state == model.optimizer.state
    served = amp.to_float32(again).predict(held[0], verbose=0)
    accuracy32 = float((np.argmax(served, -1) == held[1]).mean())
    print(f"{keras.config.backend()}: scale {model.optimizer.state.loss_scale:g}, reloaded: {same}")
    print(f"held-out accuracy {accuracy:.3f}, served in float32 {accuracy32:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
