"""`polyamp bench torch-step`: host syncs are counted, gradients restored, rows complete."""

from __future__ import annotations

import json

import pytest

from polyamp.bench.report import Row


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="the bench is about PyTorch")


@pytest.fixture(scope="module")
def torch_bench(torch):
    from polyamp_torch import _bench

    return _bench


def counted(action):
    from polyamp_torch._sync_count import SyncCount

    with SyncCount() as syncs:
        action()
    return syncs.count


class TestSyncCount:
    @pytest.mark.parametrize(
        ("action", "count"),
        [
            (lambda t, x: x.item(), 1),
            (lambda t, x: bool(x > 0), 1),
            (lambda t, x: float(x), 1),
            (lambda t, x: f"{x}", 1),
            (lambda t, x: t.is_nonzero(x), 1),
            (lambda t, x: t.equal(x, x), 1),
            (lambda t, x: t.allclose(x, x), 1),
            (lambda t, x: t.where(x > 0), 1),
            (lambda t, x: x[x > 0], 1),
            (lambda t, x: x.masked_select(x > 0), 1),
            (lambda t, x: t.empty((), device="meta").copy_(x), 1),
            (lambda t, x: t.empty((), device="meta").copy_(x, non_blocking=True), 0),
            (lambda t, x: x.to("meta"), 1),
            (lambda t, x: x.to("meta", non_blocking=True), 0),
            (lambda t, x: x.to("cpu", t.float64, copy=True), 0),
            (lambda t, x: t.where(x > 0, x, x * 2).clone().fill_(2.0), 0),
            (lambda t, x: t.full((), 2.0), 0),
            (lambda t, x: t.isfinite(x) & (x == 0), 0),
        ],
    )
    def test_operations(self, torch, action, count):
        assert counted(lambda: action(torch, torch.ones(()))) == count

    def test_results_are_untouched(self, torch):
        from polyamp_torch._sync_count import SyncCount

        with SyncCount() as syncs:
            assert (torch.ones(3).sum().item(), torch.tensor(0.0).item()) == (3.0, 0.0)
        assert syncs.names == ["aten::_local_scalar_dense"] * 2

    @pytest.mark.parametrize("name", ["sgd", "sgd-fused", "adam", "adam-fused"])
    def test_a_scaler_that_looks_twice_is_seen(self, torch, torch_bench, name):
        class Nosy(torch.amp.GradScaler):
            def update(self, new_scale=None):
                super().update(new_scale)
                self._scale.item()
                bool(self._growth_tracker)

        problem = torch_bench.Problem(torch_bench.OPTIMIZERS[name], [(2, 3), (4,)])
        plain = torch_bench.scaler_syncs(torch.amp.GradScaler("cpu"), problem)
        assert plain == (0 if "fused" in name else 1)
        assert torch_bench.scaler_syncs(Nosy("cpu"), problem) == plain + 2

    @pytest.mark.parametrize("name", ["sgd", "sgd-fused", "adam", "adam-fused"])
    def test_polyamps_scaler_in_device_mode(self, torch_bench, name):
        row = torch_bench.sync_row(name)
        assert row.limit == (0 if "fused" in name else 1)
        assert row.value == row.peer == row.limit

    def test_device_mode_is_what_is_counted(self, torch_bench, monkeypatch):
        """On the host the scaler reads; counting there would say nothing about a device."""
        scaler = torch_bench.GradScaler("cpu")
        problem = torch_bench.Problem(torch_bench.OPTIMIZERS["sgd-fused"], [(2,)])
        assert torch_bench.scaler_syncs(scaler, problem) > 0


class TestTorchStep:
    def test_restored_gradients_give_the_same_update_every_time(self, torch, torch_bench):
        problem = torch_bench.Problem(
            lambda params: torch.optim.SGD(params, lr=1.0, fused=True), [(3,), (2, 2)]
        )
        scaler = torch.amp.GradScaler("cpu")
        seen = []
        for _ in range(3):
            before = [p.detach().clone() for p in problem.params]
            assert problem.case(scaler)() > 0.0
            seen.append([b - p.detach() for b, p in zip(before, problem.params, strict=True)])
        for moved in seen:
            for delta, kept in zip(moved, problem.kept, strict=True):
                assert torch.allclose(delta, kept / 2.0**16, atol=1e-6)

    def test_rows(self, torch_bench):
        rows = torch_bench.measure("adam-fused", 3, [(4, 2), (3,)])
        assert [(r.name, r.unit, r.limit) for r in rows] == [
            ("adam-fused time", "ms", None),
            ("adam-fused ratio", "ratio", 1.02),
            ("adam-fused ratio, low", "ratio", None),
            ("adam-fused ratio, high", "ratio", 1.06),
            ("adam-fused host syncs", "count", 0),
        ]
        assert all(row.peer is not None for row in rows)
        low, value, high = rows[2].value, rows[1].value, rows[3].value
        assert 0.0 < low <= value <= high

    def test_each_optimizer_in_a_process_of_its_own(self, torch_bench, monkeypatch):
        calls = []

        def fresh(*arguments):
            calls.append(arguments)
            return [Row("x", 1.0, "ms").__dict__]

        monkeypatch.setattr(torch_bench, "in_fresh_python", fresh)
        told = []
        found = torch_bench.torch_step(True, told.append)
        names = ["sgd", "sgd-fused", "adam", "adam-fused"]
        assert [call[:3] for call in calls] == [("-m", "polyamp_torch._bench", n) for n in names]
        assert len(told) == len(found.rows) == 4
        assert found.bench == "torch-step"
        assert found.device.startswith("cpu: ")
        assert {"python", "torch", "polyamp"} <= set(found.versions)

    def test_the_process(self, torch_bench, monkeypatch, capsys):
        monkeypatch.setattr(torch_bench, "resnet50_shapes", lambda: [(2, 2), (3,)])
        for rule, limit in (("torch", 1.02), ("auto", 1.05)):
            torch_bench._main("sgd-fused", "2", rule)
            rows = [Row(**row) for row in json.loads(capsys.readouterr().out)]
            assert [row.name for row in rows][:2] == ["sgd-fused time", "sgd-fused ratio"]
            assert rows[1].limit == limit

    @pytest.mark.gpu
    def test_syncs_on_the_accelerator(self, torch_bench):
        for name in torch_bench.OPTIMIZERS:
            assert torch_bench.sync_row(name, "cuda").ok, name


class TestTorchPolicy:
    def test_both_sides_compute_the_same_bits(self, torch, torch_bench):
        from polyamp_torch import _bench_policy as bench

        inputs, target = bench.batch("cpu")
        hand, ours = bench.by_hand("cpu"), bench.plain_model("cpu")
        bench.apply_policy(ours, bench.RULES)
        with torch.autocast("cpu", torch.bfloat16):
            expected = bench.loss_of(hand(inputs), target)
        found = bench.loss_of(ours(inputs), target)
        assert found.item() == expected.item()
        found.backward()
        expected.backward()
        for a, b in zip(ours.parameters(), hand.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)

    def test_rows_of_single_calls(self, torch_bench):
        from polyamp_torch import _bench_policy as bench

        rows = bench.call_rows(2)
        assert [row.unit for row in rows] == ["us"] * 3
        assert min(min(row.value, row.peer) for row in rows) > 0.0
