"""Trains a small transformer with Transformers' Trainer or with Accelerate, and saves what each rank ends with:
python transformers_training.py FOLDER SEED trainer|accelerate BACKEND. BACKEND is "" where the library decides."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

SAMPLES, LENGTH, VOCABULARY = 32, 12, 40


def dataset(seed):
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, VOCABULARY, (SAMPLES, 1), generator=generator)
    tokens = (starts + 3 * torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


def small_model(seed):
    torch.manual_seed(seed)
    sizes = {"n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes, **no_dropout)
    )


def train(folder, seed):
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=4,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        logging_steps=4,
        save_strategy="no",
        eval_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        seed=seed,
    )
    data = dataset(seed)
    trainer = Trainer(small_model(seed), arguments, train_dataset=data, eval_dataset=data[:8])
    trainer.train()
    first, *_, last = [
        each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each
    ]
    return trainer.model, {"before": first, "after": last}


def train_with_accelerate(folder, seed):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = small_model(seed + accelerator.process_index)  # DDP starts from the values of rank 0
    loader = torch.utils.data.DataLoader(dataset(seed), batch_size=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(4):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    gathered = accelerator.gather_for_metrics(torch.tensor([accelerator.process_index]))
    assert gathered.tolist() == [*range(accelerator.num_processes)]
    assert accelerator.num_processes == 2
    return accelerator.unwrap_model(model), {"before": losses[0], "after": losses[-1]}


def main():
    folder, seed, library, backend = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    if backend:
        dist.init_process_group(backend)
    function = train if library == "trainer" else train_with_accelerate
    model, losses = function(folder, seed)
    # Accelerate has created the group if the argument is empty.
    kind = type(dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")))
    state = {name: p.detach() for name, p in model.named_parameters()}
    result = {"parameters": state, "kind": f"{kind.__module__}.{kind.__name__}"}
    torch.save(result | losses, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
