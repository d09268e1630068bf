"""The demo's two tasks, from data that comes with packages: nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyamp._errors import PolyampError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from polyamp.demo.settings import Settings

    Integers = npt.NDArray[np.int64]

EXTRA = 'pip install "polyamp[demo]"'


@dataclass(frozen=True, eq=False)
class Task:
    """A supervised task as numpy arrays; n training samples, m held-out ones.

    Attributes:
        name: "digits" or "text".
        inputs: float32 (n, 8, 8) in [0, 1] for digits; int64 (n, context) symbols for text.
        targets: int64 (n,) classes, or (n, context) the symbol that follows each input.
        held_inputs: like `inputs`, (m, ...).
        held_targets: like `targets`, (m, ...).
        classes: number of classes or of symbols; targets are 0 to classes - 1.
        metric: "accuracy" (share, higher is better) or "bits per character" (lower is better).
        baseline: what `metric` is on the held-out samples without a model worth the name.
        baseline_name: how that number comes about.
    """

    name: str
    inputs: npt.NDArray[Any]
    targets: Integers
    held_inputs: npt.NDArray[Any]
    held_targets: Integers
    classes: int
    metric: str
    baseline: float
    baseline_name: str

    def batches(self, settings: Settings) -> Integers:
        """Sample numbers, int64 (steps, accumulate, batch / accumulate): shuffled epochs.

        They depend on the number of samples and on `settings` alone.
        """
        import numpy as np

        rng = np.random.default_rng(settings.seed)
        needed = settings.steps * settings.batch
        epochs = -(-needed // len(self.inputs))
        stream = np.concatenate([rng.permutation(len(self.inputs)) for _ in range(epochs)])
        shape = (settings.steps, settings.accumulate, settings.batch // settings.accumulate)
        return stream[:needed].reshape(shape)


def load(name: str, context: int = 0) -> Task:
    """The task `name`; `context` is the number of characters per sample of "text"."""
    return _digits() if name == "digits" else _text(context)


def _digits() -> Task:
    """Handwritten digits, 8x8 pixels (UCI Optical Recognition of Handwritten Digits).

    The last fifth of every class is held out: neighbours in the data set share a writer, so
    this is harder, and more honest, than picking at random.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise PolyampError(f"the task 'digits' needs scikit-learn: {EXTRA}") from error
    import numpy as np

    data = load_digits()
    images = (data.images / 16.0).astype(np.float32)
    labels = data.target.astype(np.int64)
    held = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        members = np.flatnonzero(labels == digit)
        held[members[len(members) * 4 // 5 :]] = True
    return Task(
        name="digits",
        inputs=images[~held],
        targets=labels[~held],
        held_inputs=images[held],
        held_targets=labels[held],
        classes=10,
        metric="accuracy",
        baseline=float(np.bincount(labels[held]).max() / held.sum()),
        baseline_name="always answering the most frequent class",
    )


def _text(context: int) -> Task:
    """Python's own help texts, cut into samples of `context` characters."""
    import numpy as np

    training, held = corpus()
    symbols = sorted(set(training + held))
    number = {symbol: i for i, symbol in enumerate(symbols)}
    train_codes = np.array([number[c] for c in training], dtype=np.int64)
    held_codes = np.array([number[c] for c in held], dtype=np.int64)
    inputs, targets = _windows(train_codes, context)
    held_inputs, held_targets = _windows(held_codes, context)
    return Task(
        name="text",
        inputs=inputs,
        targets=targets,
        held_inputs=held_inputs,
        held_targets=held_targets,
        classes=len(symbols),
        metric="bits per character",
        baseline=unigram_bits(train_codes, held_targets, len(symbols)),
        baseline_name="a unigram model of the training text",
    )


def corpus() -> tuple[str, str]:
    """Training and held-out text of `pydoc_data.topics`.

    Some topics repeat sections of others word for word; a paragraph seen before is dropped, so
    that none is in both parts. The last tenth of every topic is held out.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise PolyampError(
            "the task 'text' needs pydoc_data, a part of Python's standard library that this "
            "Python was installed without; choose --task digits"
        ) from error
    seen: set[str] = set()
    training, held = [], []
    for name in sorted(topics):
        paragraphs = []
        for paragraph in topics[name].split("\n\n"):
            words = " ".join(paragraph.split())
            if words and words not in seen:
                seen.add(words)
                paragraphs.append(paragraph)
        body = "\n\n".join(paragraphs) + "\n\n"
        cut = len(body) * 9 // 10
        training.append(body[:cut])
        held.append(body[cut:])
    return "".join(training), "".join(held)


def _windows(codes: Integers, context: int) -> tuple[Integers, Integers]:
    """Consecutive samples (n, context) and, shifted by one, what follows each symbol."""
    count = (len(codes) - 1) // context
    end = count * context
    return codes[:end].reshape(count, context), codes[1 : end + 1].reshape(count, context)


def unigram_bits(training: Integers, held: Integers, classes: int) -> float:
    """Bits per symbol of `held` under the frequencies of `training` (each count plus one)."""
    import numpy as np

    counts = np.bincount(training, minlength=classes) + 1.0
    return float(-np.log2(counts / counts.sum())[held].mean())
