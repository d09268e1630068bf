"""Policies: every dialect, text and dict round trips, refusals."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_strategies import POLICIES

from polyamp._errors import PolicyError, StateError
from polyamp._policy import PRESETS, Policy, parse_policy, require_supported
from polyamp._policy_parse import DIALECTS, KEYS

F16, BF16, F32, F64 = "float16", "bfloat16", "float32", "float64"
E4M3, TF32 = "float8_e4m3fn", "tfloat32"

# text -> param, compute, output, master
MEANINGS = {
    "mixed_float16": (F32, F16, F16, None),
    "mixed_bfloat16": (F32, BF16, BF16, None),
    "float16": (F16, F16, F16, None),
    "bfloat16": (BF16, BF16, BF16, None),
    "float32": (F32, F32, F32, None),
    "float64": (F64, F64, F64, None),
    "16-mixed": (F32, F16, F32, None),
    "bf16-mixed": (F32, BF16, F32, None),
    "16-true": (F16, F16, F16, None),
    "bf16-true": (BF16, BF16, BF16, None),
    "32-true": (F32, F32, F32, None),
    "64-true": (F64, F64, F64, None),
    "16": (F32, F16, F32, None),
    "32": (F32, F32, F32, None),
    "64": (F64, F64, F64, None),
    "fp16": (F32, F16, F32, None),
    "bf16": (F32, BF16, F32, None),
    "no": (F32, F32, F32, None),
    "O0": (F32, F32, F32, None),
    "O1": (F32, F16, F32, None),
    "O2": (F16, F16, F32, F32),
    "O3": (F16, F16, F32, None),
    # jmp: bare dtypes
    "half": (F16, F16, F16, None),
    "f16": (F16, F16, F16, None),
    "f32": (F32, F32, F32, None),
    "full": (F32, F32, F32, None),
    "f64": (F64, F64, F64, None),
    "tf32": (F32, TF32, F32, None),
    # jmp: keys
    "params=float32,compute=float16,output=float32": (F32, F16, F32, None),
    "params=float32, compute=float16, output=float32": (F32, F16, F32, None),
    "p=f32,c=bf16,o=full": (F32, BF16, F32, None),
    "c=f16": (F32, F16, F16, None),
    "p=f16,c=f16": (F16, F16, F16, None),
    "p=f16,c=bf16": (F16, BF16, BF16, None),
    "p=bf16": (BF16, BF16, BF16, None),
    "o=f16": (F32, F32, F16, None),
    "c=half,o=full": (F32, F16, F32, None),
    # jmp: keys, our own beside them
    "p=f16,c=f16,o=f32,master=f32": (F16, F16, F32, F32),
    "p=f16,master=none": (F16, F16, F16, None),
    "compute_dtype=fp8_e4m3, output_dtype=torch.float32": (F32, E4M3, F32, None),
    # lenient
    " Mixed_Float16 ": (F32, F16, F16, None),
    "mixed-bfloat16": (F32, BF16, BF16, None),
    "BF16_MIXED": (F32, BF16, F32, None),
    "o2": (F16, F16, F32, F32),
    "torch.bfloat16": (BF16, BF16, BF16, None),
    " P = F32 ,C= F16": (F32, F16, F16, None),
}


@pytest.mark.parametrize(("text", "meaning"), MEANINGS.items())
def test_what_a_text_means(text, meaning):
    assert Policy.parse(text) == Policy(*meaning)
    assert parse_policy(text) == Policy.parse(text)


def test_every_name_of_every_dialect_is_tested_and_a_preset():
    names = [name for names in DIALECTS.values() for name in names]
    assert len(names) == len(set(names)) == len(PRESETS)
    assert set(names) <= set(MEANINGS)
    assert all(PRESETS[name] == Policy.parse(name) for name in names)


@pytest.mark.parametrize(("number", "text"), [(16, "16-mixed"), (32, "32-true"), (64, "64-true")])
def test_lightning_integers(number, text):
    assert Policy.parse(number) == Policy.parse(text)


def test_the_memory_tiers_are_kept():
    p = Policy.parse("p=f32,c=f16,o=f32,store=f16,accumulate=bf16,master=f64")
    assert (p.master_dtype, p.store_dtype, p.accumulate_dtype) == (F64, F16, BF16)
    assert str(p) == (
        "params=float32,compute=float16,output=float32,"
        "master=float64,store=float16,accumulate=bfloat16"
    )


def test_a_policy_parses_to_itself():
    p = Policy(F32, F16, F32)
    assert Policy.parse(p) is p


def test_dtypes_are_kept_by_canonical_name():
    assert Policy("fp32", "half", " F32 ", "double", "e5m2", "tf32") == Policy(
        F32, F16, F32, F64, "float8_e5m2", TF32
    )


def test_torch_dtypes_are_accepted():
    torch = pytest.importorskip("torch", reason="reads torch's dtype objects")
    assert Policy(torch.float32, torch.half, torch.float) == Policy(F32, F16, F32)


@given(POLICIES)
def test_text_parses_back(policy):
    assert Policy.parse(str(policy)) == policy


@given(POLICIES, POLICIES)
def test_equal_means_equal_hash_and_equal_text(a, b):
    twin = dataclasses.replace(a)
    assert twin == a
    assert hash(twin) == hash(a)
    assert (a == b) == (str(a) == str(b)) == ({a, b} == {a})


@given(POLICIES)
def test_dict_copy_and_pickle_round_trips(policy):
    data = json.loads(json.dumps(policy.to_dict()))
    assert Policy.from_dict(data) == policy
    assert (data["polyamp"], data["kind"]) == (1, "policy")
    assert copy.deepcopy(policy) == pickle.loads(pickle.dumps(policy)) == policy


@given(POLICIES)
def test_text_of_jmp_fields_alone_is_in_jmps_own_grammar(policy):
    bare = dataclasses.replace(policy, master_dtype=None, store_dtype=None, accumulate_dtype=None)
    items = dict(item.split("=") for item in str(bare).split(","))
    assert items == {
        "params": policy.param_dtype,
        "compute": policy.compute_dtype,
        "output": policy.output_dtype,
    }


def test_policies_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy(F32, F16, F32).compute_dtype = F32


@given(POLICIES)
def test_needs_scaling_where_gradients_pass_through_a_narrow_exponent(policy):
    narrow = {F16, E4M3, "float8_e5m2"}
    path = {policy.param_dtype, policy.compute_dtype, policy.output_dtype, policy.accumulate_dtype}
    assert policy.needs_scaling == bool(path & narrow)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[("16-mixed", True), ("O3", True), ("p=f32,c=e4m3,o=f32", True), ("p=f16,c=f32", True)],
        *[("bf16-mixed", False), ("bf16-true", False), ("tf32", False), ("no", False)],
        *[("p=f32,store=f16", False), ("p=f32,accumulate=f16", True)],
    ],
)
def test_needs_scaling(text, expected):
    assert Policy.parse(text).needs_scaling is expected


# --- wrong input

WRONG = {
    "mixd_float16": r"did you mean 'mixed_float16'\?",
    "bf16-mixd": r"did you mean 'bf16-mixed'\?",
    "O4": r"did you mean 'O\d'\?.*apex: O0, O1, O2, O3",
    "": "unknown policy ''. Allowed: Keras: mixed_float16",
    "int8": "Allowed: .*Lightning: 16-mixed",
    "parms=f32": r"unknown key 'parms'; did you mean 'params'\? Allowed keys: params, compute",
    "params=flot32": r"params: unknown dtype 'flot32'; did you mean 'float32'\?",
    "p=f32,p=f16": "'params' is given twice",
    "params=f32,param_dtype=f32": "'params' is given twice",
    "p=f32,,c=f16": "'' is not of the form key=dtype",
    "p=f32,c": "'c' is not of the form key=dtype",
    "p=": "'p=' is not of the form key=dtype",
    "p=f32=f16": "unknown dtype 'f32=f16'",
    "p=none": "params: unknown dtype 'none'",
    "fp8": "Transformer Engine.*compute=float8_e4m3fn",
    "float8_e5m2": "8 bits do not train",
    "transformer-engine": "Transformer Engine",
    "16-mixed@4": r"behind '@' stands a power of two",
    "c=f16@2^999": r"shift must be a whole number from -126",
    "@2^4": r"unknown policy ''",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items())
def test_wrong_texts_say_what_is_allowed(text, message):
    with pytest.raises(PolicyError, match=message):
        Policy.parse(text)


@pytest.mark.parametrize("value", [None, True, 8, 16.0, b"fp16", ["fp16"], object()])
def test_what_is_no_text_is_refused(value):
    with pytest.raises(PolicyError, match="a policy is a string, a Policy, or 16, 32 or 64"):
        Policy.parse(value)


@pytest.mark.parametrize("position", range(6))
def test_a_wrong_dtype_names_its_field(position):
    values = [F32, F32, F32, None, None, None]
    values[position] = "flot32"
    name = dataclasses.fields(Policy)[position].name
    with pytest.raises(
        PolicyError, match=f"^{name}: unknown dtype 'flot32'; did you mean 'float32'"
    ):
        Policy(*values)


def test_required_fields_cannot_be_none():
    with pytest.raises(PolicyError, match="output_dtype: unknown dtype None"):
        Policy(F32, F32, None)


PIECES = st.sampled_from([*KEYS, "p", "c", "o", "=", ",", " ", "f16", "float32", "none", "-", "@"])
GARBAGE = st.text() | st.lists(PIECES).map("".join)


def attempt(value: object) -> tuple[Policy | None, str]:
    try:
        return Policy.parse(value), ""
    except PolicyError as error:
        return None, str(error)


@given(GARBAGE)
def test_any_string_is_a_policy_or_a_policy_error(text):
    policy, message = attempt(text)
    if policy is None:
        assert repr(text)[:20] in message
    else:
        assert Policy.parse(str(policy)) == policy


@given(st.none() | st.booleans() | st.floats() | st.integers() | st.binary() | st.lists(st.text()))
def test_any_object_is_a_policy_or_a_policy_error(value):
    policy, message = attempt(value)
    if type(value) is int and value in (16, 32, 64):
        assert policy == PRESETS[str(value)]
    else:
        assert policy is None
        assert type(value).__name__ in message


# --- saved policies

SAVED = Policy(F16, F16, F32, F32).to_dict()


@pytest.mark.parametrize("key", SAVED)
def test_a_missing_key_is_named(key):
    data = {k: v for k, v in SAVED.items() if k != key}
    with pytest.raises(StateError, match=key):
        Policy.from_dict(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"polyamp": 2}, "version 2"),
        ({"polyamp": True}, "version True"),
        ({"polyamp": "1"}, "version '1'"),
        ({"kind": "rule"}, "kind 'rule'"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"compute": F16}, "unknown key 'compute'; did you mean 'compute_dtype'"),
        ({"compute_dtype": None}, "compute_dtype must be the name of a dtype, got None"),
        ({"param_dtype": 16}, "param_dtype must be the name of a dtype, got 16"),
        ({"master_dtype": True}, "master_dtype must be the name of a dtype or null, got True"),
        ({"store_dtype": [F16]}, "store_dtype must be the name of a dtype or null"),
        ({"output_dtype": "flot32"}, "output_dtype: unknown dtype 'flot32'; did you mean"),
    ],
)
def test_a_saved_policy_with_a_fault_is_refused(change, message):
    with pytest.raises(StateError, match=message):
        Policy.from_dict({**SAVED, **change})


@pytest.mark.parametrize("data", [None, "policy", [1], 1])
def test_what_is_no_dict_is_refused(data):
    with pytest.raises(StateError, match="dict"):
        Policy.from_dict(data)


def test_reading_leaves_the_dict_alone():
    before = dict(SAVED)
    Policy.from_dict(SAVED)
    assert before == SAVED


# --- what a backend can apply


def test_a_policy_within_the_limits_passes():
    policy = Policy(F32, F16, F32)
    assert require_supported(policy, "toy", param=(F32,), compute=(F16, F32), output=(F32,)) is None
    tiers = Policy(F16, F16, F32, F32, F16, BF16)
    assert require_supported(tiers, "toy", master=[F32], store=[F16], accumulate=[BF16]) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "c=f16,store=f16",
            r"'toy' cannot apply store_dtype='float16' \(allowed: leave it out; not",
        ),
        ("c=f16,accumulate=bf16", "'toy' cannot apply accumulate_dtype='bfloat16'"),
        ("O2", "master_dtype='float32'"),
        ("c=e4m3", r"compute_dtype='float8_e4m3fn' \(allowed: float16, float32\)"),
    ],
)
def test_what_a_backend_cannot_apply_is_refused_by_field(text, message):
    with pytest.raises(PolicyError, match=message):
        require_supported(Policy.parse(text), "toy", compute=(F16, F32))


def test_all_fields_that_cannot_be_applied_are_named_at_once():
    policy = Policy(F64, F16, F32, F64, F16, F16)
    with pytest.raises(PolicyError) as caught:
        require_supported(policy, "toy", param=[F32], master=[F32])
    text = str(caught.value)
    names = ["param_dtype", "master_dtype", "store_dtype", "accumulate_dtype"]
    assert all(f"{name}=" in text for name in names)
    assert "compute_dtype" not in text
    assert "allowed: leave it out, or float32" in text
    assert str(policy) in text
