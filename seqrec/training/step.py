"""A training step: the loss of an example, its gradients, the update of the weights, and whether all are finite."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from seqrec.config import TrainConfig
from seqrec.models.base import SequenceModel
from seqrec.training import contrast, objectives
from seqrec.training.objectives import Example, Loss
from seqrec.training.optimizer import Optimizers, clip_gradients
from seqrec.training.progress import FIGURE
from seqrec.training.tensors import not_finite


class LossTerms(nn.Module):
    """The module that DDP wraps: one forward call per step, however many passes the model makes inside it."""

    def __init__(self, model: SequenceModel, loss: Loss, config: TrainConfig) -> None:
        super().__init__()
        self.model, self.loss, self.config = model, loss, config

    def forward(self, example: Example) -> dict[str, Tensor]:
        """Return the loss terms of an example by name, and the model's figures."""
        device = example.target_BL.device.type
        views: list[Tensor] = []

        def task(query_BPD: Tensor, /, *, skip_last: bool = False, of: SequenceModel | None = None) -> Tensor:
            if torch.is_grad_enabled():
                views.append(query_BPD[:, -1])
            width, stop = query_BPD.shape[1], example.target_BL.shape[1] - skip_last
            target_BP = example.target_BL[:, stop - width : stop]
            number = max(0, example.number - skip_last * len(target_BP))  # every row has a last target, or none any
            index = torch.nonzero_static(target_BP.flatten(), size=number).squeeze(1)
            with torch.autocast(device, enabled=False):
                query_ND = query_BPD.flatten(0, 1).index_select(0, index).float()
                past = None
                if self.config.exclude_past:
                    past = objectives.past_items(example, self.model.options, index, width, skip_last)
                value_N = self.loss(query_ND, of or self.model, target_BP.flatten()[index], past)
            value_BP = value_N.new_zeros(target_BP.numel()).index_copy(0, index, value_N).view(target_BP.shape)
            return value_BP * example.weight

        with torch.autocast(device, torch.bfloat16, enabled=self.config.precision == "bf16"):
            terms = self.model.training_loss(example.batch, task)
            if self.config.contrast:
                value = contrast.term(self.model, example.batch, views[0], example.target_BL[:, -1])
                terms |= {"contrast": self.config.contrast * value}
            return terms


class TrainingStep:
    """Takes optimiser steps on the model."""

    def __init__(self, model: SequenceModel, count_V: Tensor, config: TrainConfig, accelerator: Accelerator) -> None:
        self.model, self.accelerator, self.clip_norm = model, accelerator, config.clip_norm
        self.optimizers = Optimizers(model, config)
        self.terms = accelerator.prepare(LossTerms(model, Loss(config, count_V), config))

    def __call__(self, example: Example) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return the loss, its terms, and the norm of the gradients, which is the loss again without clipping."""
        terms = self.terms(example)
        loss = torch.stack([value for name, value in terms.items() if not name.startswith(FIGURE)]).sum()
        self.model.zero_grad(set_to_none=True)
        self.accelerator.backward(loss)
        norm = clip_gradients(self.model, self.clip_norm) if self.clip_norm else loss.detach()
        self.optimizers.step()
        return loss.detach(), terms, norm


class Divergence:
    """Watches the steps without waiting for the device; `check` and `check_weights` raise FloatingPointError."""

    def __init__(self, model: SequenceModel, stage: str) -> None:
        self.model, self.stage = model, stage
        device = next(model.parameters()).device
        self.bad_step = torch.full((), torch.iinfo(torch.int64).max, device=device)  # first step that was not finite

    def watch(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Note whether the loss and the norm of the gradients of `step` are finite."""
        finite = (loss + norm).isfinite()
        self.bad_step = torch.where(finite, self.bad_step, self.bad_step.clamp(max=step))

    def check(self, step: int) -> None:
        """Raise if a step up to `step` was not finite; waits for the device."""
        if (bad := int(self.bad_step)) <= step:
            raise self._error("the loss or its gradient is", bad)

    def check_weights(self, step: int) -> None:
        """Raise before weights that are not finite are measured or saved."""
        self.check(step)
        if names := not_finite(self.model.state_dict()):
            raise self._error(f"the weights {', '.join(names)} are", step)

    def _error(self, what: str, step: int) -> FloatingPointError:
        stage = self.stage
        return FloatingPointError(
            f"{what} not finite at step {step} of {stage}: try a smaller {stage}.learning_rate, "
            f"more {stage}.warmup_steps, a smaller {stage}.clip_norm or {stage}.precision: fp32"
        )
