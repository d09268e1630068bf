"""Mixed precision as two framework-neutral ideas.

A **policy** says which dtype parameters, compute, outputs, stored activations and accumulated
gradients have. A **scaler** is a pure state machine, `(rule, state, signal) -> state`, that decides
by how much a loss is multiplied and whether a step is applied. Both are plain values here; the
backends (`polyamp.torch`, ...) cast, inspect and apply, and decide nothing.

    rule = polyamp.Dynamic(init_scale=2.0**15, growth_interval=1000)
    state = rule.init()
    new = polyamp.transition(rule, state, polyamp.Signal(finite=False))
    polyamp.decision(state, new).applied        # False: skip this step
    new.loss_scale                              # 16384.0

Importing this package imports no framework, not even numpy.
"""

from polyamp._dynamic import Dynamic as Dynamic
from polyamp._errors import BackendError as BackendError
from polyamp._errors import DisagreementError as DisagreementError
from polyamp._errors import PolicyError as PolicyError
from polyamp._errors import PolyampError as PolyampError
from polyamp._errors import RuleError as RuleError
from polyamp._errors import ScaleFloorError as ScaleFloorError
from polyamp._errors import SkippedStepWarning as SkippedStepWarning
from polyamp._errors import StateError as StateError
from polyamp._foreign import export_scaler as export_scaler
from polyamp._foreign import import_scaler as import_scaler
from polyamp._formats import FORMATS as FORMATS
from polyamp._formats import Format as Format
from polyamp._formats import format_of as format_of
from polyamp._gradnorm import GradNormSelector as GradNormSelector
from polyamp._history import DelayedScaling as DelayedScaling
from polyamp._history import TwoPhase as TwoPhase
from polyamp._interchange import rule_from_dict as rule_from_dict
from polyamp._interchange import rule_to_dict as rule_to_dict
from polyamp._interchange import scaler_from_dict as scaler_from_dict
from polyamp._interchange import scaler_to_dict as scaler_to_dict
from polyamp._interchange import state_from_dict as state_from_dict
from polyamp._interchange import state_to_dict as state_to_dict
from polyamp._logmax import LogMax as LogMax
from polyamp._module_scales import ModuleScales as ModuleScales
from polyamp._policy import Policy as Policy
from polyamp._policy import parse_policy as parse_policy
from polyamp._policy import require_supported as require_supported
from polyamp._policy_map import PolicyMap as PolicyMap
from polyamp._predictive import Predictive as Predictive
from polyamp._presets import presets as presets
from polyamp._presets import resolve_rule as resolve_rule
from polyamp._registry import Backend as Backend
from polyamp._registry import backend as backend
from polyamp._registry import backends as backends
from polyamp._scaling import Change as Change
from polyamp._scaling import Rule as Rule
from polyamp._scaling import Static as Static
from polyamp._scaling import bind as bind
from polyamp._scaling import transition as transition
from polyamp._select import Selector as Selector
from polyamp._selection import Capabilities as Capabilities
from polyamp._selection import Choice as Choice
from polyamp._selection import Selection as Selection
from polyamp._state import Decision as Decision
from polyamp._state import Fault as Fault
from polyamp._state import Reason as Reason
from polyamp._state import ScalerState as ScalerState
from polyamp._state import Signal as Signal
from polyamp._state import decision as decision
from polyamp._state import raise_on_fault as raise_on_fault
from polyamp._statistics import ModuleStatistics as ModuleStatistics
from polyamp._statistics import Statistics as Statistics
from polyamp._xp import Namespace as Namespace
from polyamp._xp import host as host

__version__ = "0.1.0"

__all__ = [
    "Dynamic",
    "BackendError",
    "DisagreementError",
    "PolicyError",
    "PolyampError",
    "RuleError",
    "ScaleFloorError",
    "SkippedStepWarning",
    "StateError",
    "import_scaler",
    "export_scaler",
    "FORMATS",
    "Format",
    "format_of",
    "GradNormSelector",
    "DelayedScaling",
    "TwoPhase",
    "rule_from_dict",
    "rule_to_dict",
    "scaler_from_dict",
    "scaler_to_dict",
    "state_from_dict",
    "state_to_dict",
    "LogMax",
    "ModuleScales",
    "Policy",
    "parse_policy",
    "require_supported",
    "PolicyMap",
    "Predictive",
    "presets",
    "resolve_rule",
    "Backend",
    "backend",
    "backends",
    "Change",
    "Rule",
    "Static",
    "bind",
    "transition",
    "Selector",
    "Capabilities",
    "Choice",
    "Selection",
    "Decision",
    "Fault",
    "Reason",
    "ScalerState",
    "Signal",
    "decision",
    "raise_on_fault",
    "ModuleStatistics",
    "Statistics",
    "Namespace",
    "host",
]
