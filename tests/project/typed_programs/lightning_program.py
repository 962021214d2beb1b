"""``horoplug.lightning``: the strategies of Trainer and Fabric."""

from typing import Any

import lightning

from horoplug.lightning import HorovodEnvironment, HorovodFabricStrategy, HorovodStrategy


def train(model: Any, data: Any) -> None:
    lightning.Trainer(accelerator="cpu", strategy="horovod", max_epochs=1).fit(model, data)
    strategy = HorovodStrategy(scale_lr=False, optimizer_options={"groups": 2})
    lightning.Trainer(accelerator="cpu", strategy=strategy).fit(model, data)
    fabric = lightning.Fabric(accelerator="cpu", strategy=HorovodFabricStrategy())
    fabric.launch()
    print(HorovodEnvironment().global_rank())
