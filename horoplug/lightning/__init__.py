"""Horoplug for Lightning 2: ``Trainer(strategy="horovod")`` and ``Fabric(strategy="horovod")``.

import horoplug.lightning  # registers the strategies

trainer = lightning.Trainer(accelerator="cpu", strategy="horovod", max_epochs=10)
trainer.fit(model, data)  # horovodrun -np 4 python train.py
"""

try:
    import lightning as _lightning  # noqa: F401
except ImportError as error:
    raise ImportError("horoplug.lightning needs Lightning 2: pip install lightning") from error

from lightning.fabric.strategies import STRATEGY_REGISTRY as _FABRIC
from lightning.pytorch.strategies import StrategyRegistry as _TRAINER

from horoplug.lightning.environment import HorovodEnvironment
from horoplug.lightning.fabric_strategy import HorovodFabricStrategy
from horoplug.lightning.strategy import HorovodStrategy

__all__ = ["HorovodEnvironment", "HorovodFabricStrategy", "HorovodStrategy"]

_TRAINER.register(
    "horovod", HorovodStrategy, description="One process per rank, started by horovodrun"
)
_FABRIC.register(
    "horovod", HorovodFabricStrategy, description="One process per rank, started by horovodrun"
)
