import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
images = torch.rand(96, 1, 6, 6)
dataset = torch.utils.data.TensorDataset(images, (images.sum((1, 2, 3)) > 18).long())
sampler = hvd.elastic.ElasticSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.fc = torch.nn.Linear(64, 2)

    def forward(self, x):
        return F.log_softmax(self.fc(F.relu(self.conv(x)).flatten(1)), dim=1)


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.001 * hvd.size())
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.none,
    op=hvd.Average,
)


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, args.epochs):  # noqa: B020
        state.model.train()
        for batch_idx, (data, target) in enumerate(loader):
            state.optimizer.zero_grad()
            loss = F.nll_loss(state.model(data), target)
            loss.backward()
            state.optimizer.step()
            state.batch = batch_idx
            state.sampler.record_batch(batch_idx, len(data))
            if batch_idx % 2 == 0:
                state.commit()
        state.sampler.set_epoch(state.epoch + 1)
        state.commit()


def on_state_reset():
    for group in state.optimizer.param_groups:
        group["lr"] = 0.001 * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
print("result", hvd.size(), state.epoch, sum(p.double().sum().item() for p in model.parameters()))
