"""Trains a small model with Lightning and saves what each rank ends with: python lightning_training.py FOLDER JSON."""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

# Lightning imports mpi4py to look for an MPI, and does not expect the exception of mpi4py 4 where none is installed.
sys.modules["mpi4py"] = None

SAMPLES, BATCH = 64, 4


def dataset(seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    return TensorDataset(inputs, inputs[:, :1] * 2 - inputs[:, 1:2])


def network(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )


class Model(LightningModule):
    def __init__(self, options):
        super().__init__()
        # Every rank starts from other values: those of rank 0 count.
        self.net = network(options["seed"] + int(os.environ.get("LOCAL_RANK", 0)))
        self.options = options
        self.automatic_optimization = not options.get("manual")

    def loss(self, batch):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.net(inputs), targets)

    def training_step(self, batch, index):
        loss = self.loss(batch)
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer):
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        norms = self.all_gather(torch.stack([gradient.norm() for gradient in gradients]).norm())
        assert norms.shape == (self.trainer.world_size,)
        assert torch.equal(norms, norms[:1].expand_as(norms)), "hooks see gradients of their rank"

    def validation_step(self, batch, index):
        self.log("validation", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        rate = self.options.get("rate", 0.05)
        if self.options.get("manual"):
            parts = self.net[:2], self.net[2:]
            return [torch.optim.SGD(part.parameters(), lr=rate) for part in parts], []
        optimizer = torch.optim.Adam(self.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [schedule]


class Rates(Callback):
    """Records the learning rate of each epoch."""

    def __init__(self):
        self.rates = []

    def on_train_epoch_start(self, trainer, module):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def strategy(options):
    name = options["strategy"]
    if name in ("gloo", "horoplug"):
        return DDPStrategy(process_group_backend=name), {"devices": 2}
    import horoplug.lightning

    if name == "by name":
        return "horovod", {}
    return horoplug.lightning.HorovodStrategy(**options.get("arguments", {})), {}


def train(folder, options):
    chosen, more = strategy(options)
    rates = Rates()
    checkpoint = ModelCheckpoint(folder, filename="model", save_last=True)
    trainer = Trainer(
        accelerator="cpu",
        strategy=chosen,
        max_epochs=options.get("epochs", 2),
        callbacks=[rates, checkpoint],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
        **options.get("trainer", {}),
    )
    model = Model(options)
    # Without the argument, Lightning shuffles with a DistributedSampler of its own.
    loader = DataLoader(dataset(options["seed"]), BATCH, shuffle=False)
    validation = DataLoader(dataset(options["seed"] + 1), BATCH)
    trainer.fit(model, loader, validation, ckpt_path=options.get("resume"))
    if options.get("again"):
        trainer.fit_loop.max_epochs += 1
        trainer.fit(model, loader, validation)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    (tested,) = trainer.validate(model, validation, verbose=False)
    picked = trainer.strategy.broadcast({"rank": trainer.global_rank}, 1)
    assert picked == {"rank": 1}
    assert trainer.strategy.reduce_boolean_decision(trainer.global_rank == 0, all=False)
    assert not trainer.strategy.reduce_boolean_decision(trainer.global_rank == 0, all=True)
    total = trainer.strategy.reduce(torch.tensor(trainer.global_rank + 1), reduce_op="sum")
    assert total == 3
    trainer.strategy.barrier()
    return trainer, {
        "parameters": {name: p.detach() for name, p in model.named_parameters()},
        "metrics": metrics,
        "tested": tested,
        "rates": rates.rates,
        "checkpoint": checkpoint.last_model_path,
    }


def train_with_fabric(folder, options):
    if options["strategy"] == "fabric":
        import horoplug.lightning  # noqa: F401

        fabric = Fabric(accelerator="cpu", strategy="horovod")
    else:
        fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()
    model = network(options["seed"] + fabric.global_rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(dataset(options["seed"]), BATCH))
    for index, (inputs, targets) in enumerate(loader):
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            fabric.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        if index % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert fabric.all_reduce(torch.tensor([fabric.global_rank + 1.0])).item() == 1.5
    assert fabric.broadcast(fabric.global_rank, src=1) == 1
    fabric.save(f"{folder}/fabric.ckpt", {"model": model, "optimizer": optimizer})
    parameters = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    fabric.load(f"{folder}/fabric.ckpt", {"model": model, "optimizer": optimizer})
    return fabric, {"parameters": parameters}


def main():
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    warnings.filterwarnings("error", message=".*lr_scheduler.*")
    with_fabric = options["strategy"].startswith("fabric")
    used, result = (train_with_fabric if with_fabric else train)(folder, options)
    torch.save(result | {"world": used.world_size}, folder / f"{used.global_rank}.pt")


if __name__ == "__main__":
    main()
