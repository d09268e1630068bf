"""The demo's data: two sets that come with what is installed, split without leaks."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest

from polyamp import PolyampError
from polyamp.demo import Settings, data

TINY = Settings(steps=3, batch=4, learning_rate=0.1, width=8, depth=1, heads=2, context=32)


def test_digits_are_split_by_class_and_nothing_is_lost():
    from sklearn.datasets import load_digits

    task, whole = data.load("digits"), load_digits()
    assert len(task.inputs) + len(task.held_inputs) == 1797
    assert task.inputs.shape[1:] == task.held_inputs.shape[1:] == (8, 8)
    assert task.inputs.dtype == np.float32
    assert (task.inputs.min(), task.inputs.max()) == (0.0, 1.0)
    both = np.concatenate([task.inputs, task.held_inputs]).reshape(1797, 64) * 16
    assert sorted(map(tuple, both)) == sorted(map(tuple, whole.data))
    for digit in range(10):
        held, count = (task.held_targets == digit).sum(), (whole.target == digit).sum()
        assert held == count - count * 4 // 5
    assert task.classes == 10
    assert 0.10 <= task.baseline < 0.11


def test_text_is_long_and_the_parts_share_no_paragraph():
    training, held = data.corpus()
    assert len(training) > 100_000
    assert 0.09 < len(held) / len(training) < 0.12

    def paragraphs(text):
        return {" ".join(p.split()) for p in text.split("\n\n") if len(p) > 60}

    assert len(paragraphs(held)) > 50
    assert not paragraphs(training) & paragraphs(held)


def test_text_samples_predict_the_next_character():
    training, held = data.corpus()
    task = data.load("text", 32)
    assert task.classes == len(set(training + held))
    assert task.inputs.shape == task.targets.shape == ((len(training) - 1) // 32, 32)
    assert task.held_inputs.shape == ((len(held) - 1) // 32, 32)
    assert np.array_equal(task.inputs.ravel()[1:], task.targets.ravel()[:-1])
    symbols = sorted(set(training + held))
    assert "".join(symbols[i] for i in task.inputs[:4].ravel()) == training[:128]
    assert 3.0 < task.baseline < math.log2(task.classes)


def test_unigram_bits_by_hand():
    bits = data.unigram_bits(np.array([0, 0, 1]), np.array([0, 1]), 2)
    assert bits == pytest.approx((-math.log2(0.6) - math.log2(0.4)) / 2)


def test_batches_are_shuffled_epochs_that_only_the_seed_changes():
    task = data.load("digits")
    count = len(task.inputs)
    long = replace(TINY, batch=count, steps=2, accumulate=1)
    batches = task.batches(long)
    assert batches.shape == (2, 1, count)
    for epoch in batches:
        assert np.array_equal(np.sort(epoch[0]), np.arange(count))
    assert not np.array_equal(batches[0], batches[1])
    assert np.array_equal(batches, task.batches(replace(long, width=99)))
    assert not np.array_equal(batches, task.batches(replace(long, seed=1)))
    assert task.batches(replace(TINY, accumulate=2)).shape == (3, 2, 2)


@pytest.mark.parametrize(
    ("module", "load"), [("sklearn.datasets", "digits"), ("pydoc_data.topics", "text")]
)
def test_missing_data_says_what_to_do(monkeypatch, module, load):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(PolyampError, match=r"polyamp\[demo\]|--task digits"):
        data.load(load, 32)
