"""Files: what is read from them, what is refused, and that reading one never runs anything."""

from __future__ import annotations

import argparse
import enum
import io
import json
import os
import pickle
import sys
import types
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
from foreign_scalers import DeepSpeedZero
from test_foreign import MEGATRON_CONFIG, STAGE0, TORCH, ZERO
from test_foreign_continuation import quiet

import polyamp
from polyamp import StateError, import_scaler
from polyamp._foreign_files import read_file, write_file

DEEPSPEED = "deepspeed.runtime.fp16.loss_scaler"


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def scaler_class(monkeypatch: pytest.MonkeyPatch) -> type:
    """A class that pickles as DeepSpeed's scaler does, and is gone when the file is read."""
    made = type("DynamicLossScaler", (), {"__module__": DEEPSPEED})
    names = [DEEPSPEED.rsplit(".", i)[0] for i in range(3, 0, -1)] + [DEEPSPEED]
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    stage = enum.Enum("Stage", {"two": 2}, module=DEEPSPEED)
    vars(sys.modules[DEEPSPEED]).update(DynamicLossScaler=made, Stage=stage)
    return made


def filled(cls: type, values: dict[str, Any]) -> Any:
    made = cls()
    made.__dict__.update(values)
    return made


class Touch:
    """Pickles as a call that makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


class Shell:
    """Pickles as a shell command that makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"echo > {self.path}",)


# torch checkpoints


def test_a_torch_checkpoint_of_every_kind(tmp_path: Path, torch: Any) -> None:
    wanted = import_scaler(TORCH)
    weights = {"w": torch.zeros(4, 4, dtype=torch.bfloat16)}
    for name, data in (
        ("scaler.pt", TORCH),
        ("plain.pth", {"model": weights, "scaler": TORCH}),
        ("lightning.ckpt", {"state_dict": weights, "MixedPrecision": TORCH}),
    ):
        torch.save(data, tmp_path / name)
        assert import_scaler(tmp_path / name) == wanted
    torch.save(TORCH, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert import_scaler(str(tmp_path / "old.pt")) == wanted
    assert import_scaler(tmp_path, "accelerate") == wanted


def test_deepspeed_s_pickled_object_is_read_without_deepspeed(
    tmp_path: Path, torch: Any, scaler_class: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = DeepSpeedZero()
    for bad in (0, 0, 1, 0, 1, 0, 0):
        native.step(bool(bad))
    fields = {**native.save()["loss_scaler"], "dtype": torch.float16}
    checkpoint = {
        "optimizer_state_dict": {
            "loss_scaler": filled(scaler_class, fields),
            "dynamic_loss_scale": True,
            "overflow": False,
            "zero_stage": sys.modules[DEEPSPEED].Stage.two,
            "single_partition_of_fp32_groups": [torch.zeros(3)],
        },
        "ds_version": "0.16",
    }
    paths = [tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt", tmp_path / "old.pt"]
    torch.save(checkpoint, paths[0])
    del checkpoint["optimizer_state_dict"]["zero_stage"]
    torch.save(checkpoint, paths[1], _use_new_zipfile_serialization=False)
    for name in [name for name in sys.modules if name.startswith("deepspeed")]:
        monkeypatch.delitem(sys.modules, name)
    for path in paths:
        assert import_scaler(path) == import_scaler(native.save())
    assert not any(name.startswith("deepspeed") for name in sys.modules)


def test_megatron_s_arguments_lie_beside_its_state(tmp_path: Path, torch: Any) -> None:
    numpy = pytest.importorskip("numpy")
    saved = {
        "scale": torch.tensor([64.0]),
        "growth_tracker": 1,
        "hysteresis_tracker": 0,
    }
    checkpoint = {
        "args": argparse.Namespace(**MEGATRON_CONFIG, params_dtype=torch.float16),
        "optimizer": {"grad_scaler": saved, "optimizer": {}},
        "rng_state": [{"np_rng_state": numpy.random.RandomState(0).get_state()}],
    }
    torch.save(checkpoint, tmp_path / "model_optim_rng.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rule, state = import_scaler(tmp_path / "model_optim_rng.pt")
    assert (rule.growth_interval, state.clean, state.left) == (3, 1, 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("bomb", [Touch, Shell])
def test_a_malicious_checkpoint_runs_nothing_at_any_depth(
    tmp_path: Path, torch: Any, bomb: Any, legacy: bool, scaler_class: type
) -> None:
    mark = tmp_path / "it_ran"
    evil = bomb(mark)
    inside = filled(scaler_class, {**ZERO, "dtype": evil})
    for depth, data in enumerate(
        (
            evil,
            {"scaler": evil},
            {"scaler": TORCH, "callbacks": [{"x": (1, evil)}]},
            {"optimizer_state_dict": {"loss_scaler": inside}},
            {"args": argparse.Namespace(a=evil), "optimizer": {"grad_scaler": TORCH}},
            {**TORCH, "scale": evil},
        )
    ):
        path = tmp_path / f"{depth}.pt"
        torch.save(data, path, _use_new_zipfile_serialization=not legacy)
        with pytest.raises(StateError, match="polyamp never unpickles objects"):
            import_scaler(path)
        assert not mark.exists(), depth
    path.write_bytes(pickle.dumps(evil))
    with pytest.raises(StateError, match="never unpickles"):
        import_scaler(path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(evil))
    assert mark.exists(), "the bomb is real"


def test_what_stands_under_an_allowed_name_is_inert(tmp_path: Path, torch: Any) -> None:
    """A pickle may call anything by name: a stub answers, whatever the name and the arguments."""
    mark = tmp_path / "it_ran"
    buffer = io.BytesIO()
    torch.save({**TORCH, "x": Shell(mark)}, buffer)
    path = tmp_path / "renamed.pt"
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(path, "w") as new:
        for item in old.namelist():
            data = old.read(item)
            if item.endswith("data.pkl"):
                assert b"cposix\nsystem\n" in data
                data = data.replace(b"cposix\nsystem\n", b"cnumpy.lib.os\nsystem\n")
            new.writestr(item, data)
    assert import_scaler(path) == import_scaler(TORCH)
    assert not mark.exists()


def test_what_is_refused_is_told_in_our_own_words(tmp_path: Path, torch: Any) -> None:
    data = {"scaler": TORCH, "x": types.SimpleNamespace(a=1)}
    torch.save(data, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(StateError) as told:
        import_scaler(tmp_path / "old.pt")
    assert str(told.value) == (
        f"{tmp_path / 'old.pt'} cannot be read as plain data: it holds more than tensors, numbers,"
        " strings and containers, or is damaged. polyamp never unpickles objects, since that can"
        " run code. Where the file was made, load it and save the scaler alone:"
        " torch.save(scaler.state_dict(), 'scaler.pt'), or as JSON what state_dict() or to_dict()"
        " returns"
    )


def test_unknown_objects_are_named(tmp_path: Path, torch: Any) -> None:
    torch.save({"scaler": TORCH, "x": types.SimpleNamespace(a=1)}, tmp_path / "x.pt")
    with pytest.raises(StateError, match=r"can rebuild: types\.SimpleNamespace"):
        import_scaler(tmp_path / "x.pt")


# Keras files


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_keras_files(tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    pytest.importorskip("h5py")
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(), initial_scale=512.0, dynamic_growth_steps=7
    )
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    optimizer.step_counter.assign(5)
    optimizer.dynamic_scale.assign(64.0)
    wanted = import_scaler(optimizer)
    assert (wanted[0].growth_interval, wanted[1].clean) == (7, 5)  # type: ignore[attr-defined]
    model.save(tmp_path / "m.keras")
    model.save_weights(tmp_path / "m.weights.h5")
    assert import_scaler(tmp_path / "m.keras") == wanted
    with pytest.warns(UserWarning, match="growth_interval=2000"):
        assert import_scaler(tmp_path / "m.weights.h5")[1] == wanted[1]
    config = {"initial_scale": 512.0, "dynamic_growth_steps": 7}
    assert import_scaler(tmp_path / "m.weights.h5", rule=config) == wanted
    plain = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    plain.compile("adam", loss="mse")
    plain.save(tmp_path / "p.keras")
    plain.save_weights(tmp_path / "p.weights.h5")
    with pytest.raises(StateError, match="not compiled with"):
        import_scaler(tmp_path / "p.keras")
    with pytest.raises(StateError, match="holds no variables of"):
        import_scaler(tmp_path / "p.weights.h5")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.parametrize("rule", ["auto", "megatron", None])
def test_keras_files_of_polyamp_s_own(tmp_path: Path, rule: str | None) -> None:
    keras = pytest.importorskip("keras")
    pytest.importorskip("h5py")
    amp = pytest.importorskip("polyamp.keras")
    optimizer = amp.LossScaleOptimizer(keras.optimizers.Adam(), rule=rule)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    amp.compile(model, optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    data = optimizer.to_dict()
    data["state"] = {**data["state"], "loss_scale": 64.0, "clean": 5, "step": 9, "skipped": 2}
    restored = amp.LossScaleOptimizer.from_dict(data, keras.optimizers.Adam())
    restored.build(model.trainable_variables)
    optimizer.set_weights([v.numpy() for v in restored.variables])
    wanted = polyamp.scaler_from_dict(data)
    if rule is None:  # Keras' own two numbers and two variables
        wanted = (wanted[0], wanted[0].init()._replace(loss_scale=64.0, clean=5))
    for name in ("m.keras", "m.h5"):
        model.save(tmp_path / name)
        assert import_scaler(tmp_path / name) == wanted
    model.save_weights(tmp_path / "m.weights.h5")
    with pytest.raises(StateError, match=r"without its rule: read the \.keras file"):
        import_scaler(tmp_path / "m.weights.h5")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[]", "was not compiled with"),
        ('{"compile_config": 3}', "was not compiled with"),
        ('{"compile_config": {"optimizer": "adam"}}', "was not compiled with"),
        ("nonsense", "is not JSON"),
        (
            '{"compile_config": {"optimizer": {"module": "keras.optimizers",'
            ' "class_name": "LossScaleOptimizer", "config": 3}}}',
            r"model\.weights\.h5 is missing",
        ),
    ],
    ids=range(5),
)
def test_a_keras_archive_that_cannot_be_right(tmp_path: Path, config: str, words: str) -> None:
    with zipfile.ZipFile(tmp_path / "m.keras", "w") as archive:
        archive.writestr("config.json", config)
        archive.writestr("metadata.json", "{}")
    with pytest.raises(StateError, match=words):
        import_scaler(tmp_path / "m.keras")


@pytest.mark.parametrize("shape", [(), (3,)], ids=["scalars", "vectors"])
def test_hdf5_of_other_contents(tmp_path: Path, shape: Any) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file["optimizer_weights/a"] = 1.0
    with pytest.raises(StateError, match="cannot be read as a Keras file"):
        import_scaler(tmp_path / "m.h5")
    with h5py.File(tmp_path / "n.h5", "w") as file:
        file.create_dataset("optimizer_weights/x/dynamic_scale", shape, "f4", fillvalue=8.0)
        file.create_dataset("optimizer_weights/x/step_counter", shape, "i4", fillvalue=2)
        file.attrs["training_config"] = '[{"optimizer_config": 3}]'
    if shape:
        with pytest.raises(StateError, match="holds no variables of keras"):
            import_scaler(tmp_path / "n.h5")
    else:
        state = quiet(import_scaler, tmp_path / "n.h5")[1]
        assert (state.loss_scale, state.clean) == (8.0, 2)


# Other files


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", b"{", "is not JSON"),
        ("a.json", b"[" * 100_000, "is not JSON|cannot read"),
        ("a.json", b'{"scale": NaN}', "no loss scaler that is known"),
        ("a.pkl", pickle.dumps({"scale": 1.0}), "is a Python pickle, no torch .*never unpickles"),
        ("a.pt", b"", "is neither JSON, a torch checkpoint, nor a Keras file"),
        ("a.pt", b"PK\x03\x04garbage", "damaged archive"),
        ("a.pt", b"\x80\x02garbage", "never unpickles"),
        ("a.npz", b"\x93NUMPY", "polyamp reads nothing else"),
        ("a.h5", b"\x89HDF\r\n\x1a\nxx", "cannot be read as a Keras file"),
    ],
    ids=range(9),
)
def test_what_cannot_be_read(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StateError, match=words):
        import_scaler(tmp_path / name)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"cannot read .*nowhere\.json: No such file"):
        read_file(tmp_path / "nowhere.json")
    with pytest.raises(StateError, match=r"is a directory without a scaler\.pt"):
        read_file(tmp_path)


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "stage0.json"
    path.write_text(json.dumps(STAGE0))
    assert quiet(import_scaler, path) == quiet(import_scaler, STAGE0)


# Writing


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    write_file(out, {"a": 1}, "torch")
    with pytest.raises(StateError, match="is there already; --force"):
        write_file(out, {"a": 2}, "torch")
    with pytest.raises(ValueError, match="JSON compliant"):
        write_file(out, {"a": float("nan")}, "torch", force=True)
    assert json.loads(out.read_text()) == {"a": 1}
    write_file(out, {"a": 2}, "torch", force=True)
    assert json.loads(out.read_text()) == {"a": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
    assert out.stat().st_mode & 0o400
    with pytest.raises(StateError, match="cannot write"):
        write_file(tmp_path / "no" / "out.json", {}, "torch")


def test_megatron_finds_a_tensor_where_it_expects_one(tmp_path: Path, torch: Any) -> None:
    rule = polyamp.Dynamic.like("megatron")
    data = polyamp.export_scaler(rule, rule.init(), "megatron")
    write_file(tmp_path / "out.pt", data, "megatron")
    saved = torch.load(tmp_path / "out.pt", weights_only=True)
    assert saved["scale"].dtype == torch.float32
    assert saved["scale"].tolist() == [2.0**32]
    assert quiet(import_scaler, tmp_path / "out.pt") == (rule, rule.init())
