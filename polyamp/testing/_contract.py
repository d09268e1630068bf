"""The tests every backend passes, ours and third parties'.

    import polyamp_mine
    from polyamp.testing import BackendContract

    class TestMine(BackendContract):
        backend = polyamp_mine

        def to_array(self, array):      # numpy array -> the framework's array
            return mine.asarray(array)

        def to_numpy(self, array):      # the framework's array -> numpy array
            return mine.to_numpy(array)

pytest collects the inherited tests. The expected values are the core's own on Python numbers, and
plain arithmetic.
"""

from __future__ import annotations

from polyamp._registry import _members
from polyamp.testing._checks import same
from polyamp.testing._checks_arrays import ArrayChecks
from polyamp.testing._checks_runs import RunChecks
from polyamp.testing._checks_xp import NamespaceChecks


class BackendContract(NamespaceChecks, ArrayChecks, RunChecks):
    """Tests of the `polyamp.Backend` protocol; see the module's docstring for how to use it.

    Attributes:
        backend: the module under test.
    """

    def test_has_every_member(self) -> None:
        missing = [name for name in _members() if not hasattr(self.backend, name)]
        same(missing, [], "members that the backend lacks")

    def test_name_and_devices(self) -> None:
        same(type(self.backend.NAME), str, "type of NAME")
        names = list(self.backend.devices())
        same({type(name) for name in names}, {str}, "types of the device names")

    def test_modes_begin_with_eager(self) -> None:
        for kind in ("transition", "training"):
            modes = list(self.backend.modes(kind))
            same((modes[:1], len(set(modes))), (["eager"], len(modes)), f"modes({kind!r})")
