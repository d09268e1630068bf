"""Policy maps as dicts, JSON and TOML files."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_strategies import MAPS

from polyamp._errors import StateError
from polyamp._policy_map import PolicyMap


@given(MAPS)
def test_dict_json_and_toml_round_trips_keep_order(rules):
    for back in (
        PolicyMap.from_dict(rules.to_dict()),
        PolicyMap.from_dict(json.loads(json.dumps(rules.to_dict()))),
        PolicyMap.from_json(rules.to_json()),
        PolicyMap.from_toml(rules.to_toml()),
    ):
        assert back == rules
        assert [p for p, _ in back.rules] == [p for p, _ in rules.rules]


def test_toml_escapes_what_a_basic_string_cannot_hold():
    pattern = 're:"\\w\t\x7f\x00\r\né'
    rules = PolicyMap({pattern.replace("\x00", ""): "fp16", "b": "bf16"})
    text = rules.to_toml()
    assert '"re:\\"\\\\w\\u0009\\u007f\\u000d\\u000aé"' in text
    assert PolicyMap.from_toml(text) == rules


WRITTEN = PolicyMap({"encoder.**": "16-mixed", "head": "float32"}, "bf16-mixed")


def test_a_hand_written_toml_file_with_a_table_of_rules():
    text = """
polyamp = 1
kind = "policy_map"
default = "bf16-mixed"

[rules]
"encoder.**" = "fp16"
head = "no"
"""
    assert PolicyMap.from_toml(text) == WRITTEN


def test_a_hand_written_json_file_with_a_mapping_of_rules():
    text = """{"polyamp": 1, "kind": "policy_map", "default": "p=f32,c=bf16,o=f32",
               "rules": {"encoder.**": "O1", "head": "O0"}}"""
    assert PolicyMap.from_json(text) == WRITTEN


def test_policies_are_written_by_their_canonical_text():
    assert WRITTEN.to_dict() == {
        "polyamp": 1,
        "kind": "policy_map",
        "default": "params=float32,compute=bfloat16,output=float32",
        "rules": [
            {
                "pattern": "encoder.**",
                "policy": "params=float32,compute=float16,output=float32",
            },
            {"pattern": "head", "policy": "params=float32,compute=float32,output=float32"},
        ],
    }


@pytest.mark.parametrize("key", WRITTEN.to_dict())
def test_a_missing_key_is_named(key):
    data = {k: v for k, v in WRITTEN.to_dict().items() if k != key}
    with pytest.raises(StateError, match=key):
        PolicyMap.from_dict(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"polyamp": 2}, "version 2"),
        ({"kind": "policy"}, "kind 'policy'"),
        ({"defualt": "fp16"}, "unknown key 'defualt'; did you mean 'default'"),
        ({"default": 16}, "default must be a string, got 16"),
        ({"default": "fp61"}, "default: unknown policy 'fp61'; did you mean 'fp16'"),
        ({"rules": "head"}, "rules must be a list or a mapping"),
        ({"rules": None}, "rules must be a list or a mapping"),
        ({"rules": ["head"]}, r"rules\[0\] must have a pattern and a policy"),
        ({"rules": [{"pattern": "a"}]}, r"rules\[0\]: missing key policy"),
        ({"rules": [{"pattern": "a", "policy": "no", "x": 1}]}, r"rules\[0\]: unknown key 'x'"),
        ({"rules": [{"pattern": 1, "policy": "no"}]}, r"pattern of rules\[0\] must be a string"),
        ({"rules": [{"pattern": "a", "policy": True}]}, r"policy of rules\[0\] must be a string"),
        ({"rules": {"a": 1}}, "rule 'a' must be a string, got 1"),
        ({"rules": {"a..b": "no"}}, "empty segment"),
        ({"rules": {"a": "fp61"}}, "rule 'a': unknown policy 'fp61'"),
        ({"rules": [{"pattern": "a", "policy": "no"}] * 2}, "pattern 'a' has two rules"),
    ],
)
def test_a_saved_map_with_a_fault_is_refused(change, message):
    with pytest.raises(StateError, match=message):
        PolicyMap.from_dict({**WRITTEN.to_dict(), **change})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "dict"),
        ('{"polyamp": 1, "polyamp": 1}', "'polyamp' is given twice"),
        ('{"rules": {"a": "no", "a": "fp16"}}', "'a' is given twice"),
        (None, "a JSON text must be a string"),
    ],
)
def test_what_is_no_json_of_a_map_is_refused(text, message):
    with pytest.raises(StateError, match=message):
        PolicyMap.from_json(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a =", "not TOML"),
        ("a = 1\na = 2", "not TOML"),
        ("", "'polyamp'"),
        (b"polyamp = 1", "a TOML text must be a string"),
    ],
)
def test_what_is_no_toml_of_a_map_is_refused(text, message):
    with pytest.raises(StateError, match=message):
        PolicyMap.from_toml(text)


@given(st.text())
def test_garbage_files_give_a_state_error(text):
    for read in (PolicyMap.from_json, PolicyMap.from_toml):
        with pytest.raises(StateError) as caught:
            read(text)
        assert str(caught.value)
