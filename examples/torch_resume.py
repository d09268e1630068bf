"""Train in float16 with a schedule and clipping, stop, and go on from a checkpoint.

    python examples/torch_resume.py [STEPS]

Ends with the parameters of a run that was never stopped.
"""

from __future__ import annotations

import io
import sys

import torch

import polyamp.torch as amp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Run:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        ).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        self.scaler = amp.GradScaler(DEVICE, rule="megatron")  # 2**32: the first steps are skipped

    def parts(self) -> dict[str, object]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "scaler": self.scaler,
        }

    def train(self, steps: range) -> None:
        for step in steps:
            inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(step)).to(DEVICE)
            with amp.autocast("fp16", DEVICE):
                loss = ((self.model(inputs).float() - inputs.sum(1, keepdim=True)) ** 2).mean()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            amp.lr_step(self.schedule, self.scaler)

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self.parts().items()}, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        states = torch.load(io.BytesIO(saved), weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(states[name])


def main(steps: int = 60) -> None:
    whole, first, second = Run(), Run(), Run()
    whole.train(range(steps))
    first.train(range(steps // 2))
    second.load(first.save())
    second.train(range(steps // 2, steps))
    pairs = zip(whole.model.parameters(), second.model.parameters(), strict=True)
    state = second.scaler.state
    print(f"scale {state.loss_scale:g}, {state.skipped} of {state.step} steps skipped")
    print("equal to the run that was never stopped:", all(torch.equal(a, b) for a, b in pairs))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
