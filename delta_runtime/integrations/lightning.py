"""A callback that makes a Lightning Trainer train inside a byte budget.

    Trainer(..., callbacks=[DeltaCallback(budget="10GiB")])

Covers `fit`: the runtime is entered when training starts, and left when it ends, or raises. Where steps end the
runtime finds by itself: where something runs behind a backward. With several backwards a batch, as manual optimization
may have, each is a step, and what is logged is the last. Does not cover `validate`, `test` and `predict`, which save
nothing for a backward.

Lightning has two distributions, `lightning` and `pytorch_lightning`. The callback is of the one that is imported
already; of both, or of neither, it is of `lightning`. The other's Trainer takes it too, in a list.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or (
    "lightning.pytorch" in sys.modules
    or ("pytorch_lightning" not in sys.modules and importlib.util.find_spec("lightning"))
):
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
else:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.callbacks import Callback

from delta_runtime.core.units import BudgetSpec
from delta_runtime.report.step_report import StepReport
from delta_runtime.runtime import Runtime


class DeltaCallback(Callback):
    """Trains inside a byte budget, and logs what that costs.

    Each `fit` has a runtime of its own. The entries of `Runtime.metrics` are logged behind each batch, as
    `LightningModule.log` does it.

    Args:
        budget: most bytes that the device may hold; see `Runtime`.
        log: whether to log.
        options: further arguments of `Runtime`, but for `device`, which is the Trainer's.

    Example:
        >>> trainer = Trainer(callbacks=[DeltaCallback(budget="10GiB")])   # doctest: +SKIP
        >>> trainer.fit(model, loader)                                    # doctest: +SKIP
    """

    def __init__(self, budget: BudgetSpec = "auto", *, log: bool = True, **options: Any) -> None:
        super().__init__()
        self.budget = budget
        self.log_figures = log
        self.options = options
        self.runtime: Runtime | None = None
        """Of the training that goes on; None before and after."""
        self.report: StepReport | None = None
        """Of the last training; None before."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the runtime, and enter it.

        Raises:
            UsageError: an argument of the runtime makes no sense, or another one is entered.
        """
        self._end()
        runtime = Runtime(self.budget, device=str(pl_module.device), **self.options)
        runtime.__enter__()
        self.runtime = runtime

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Log the figures of the step that is over."""
        if self.runtime is not None and self.log_figures:
            figures = self.runtime.metrics()
            if figures:
                pl_module.log_dict(figures, on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the runtime; `report` is what it came to."""
        self._end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave it where training raised."""
        self._end()

    def _end(self) -> None:
        runtime, self.runtime = self.runtime, None
        if runtime is not None:
            runtime.close()
            self.report = runtime.report()
