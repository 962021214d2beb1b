"""Train a small transformer to write text, character by character, on one process or several.

    python examples/pytorch/language_model.py                         # one process
    horovodrun -np 2 python examples/pytorch/language_model.py        # on two processes

The text is Python's reference, which ``help()`` shows and which comes with every Python; --text selects another file.
Besides the usual five lines (see train.py) the script shows a learning rate with warm-up, clipping of the averaged
gradients, compression of gradients to 16 bits, and a checkpoint from which training continues.
"""

import argparse
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import horoplug.torch as hvd

try:
    from tqdm import tqdm  # type: ignore[import-untyped,import-not-found,unused-ignore]
except ImportError:  # then without a progress bar
    tqdm = None


@dataclass
class Text:
    """A text as indices into its alphabet, int64 of shape (length,). The last tenth is used for validation."""

    alphabet: str
    train: torch.Tensor
    validation: torch.Tensor

    def decode(self, numbers: torch.Tensor) -> str:
        return "".join(self.alphabet[number] for number in numbers.tolist())


def load(path: Path | None, limit: int) -> Text:
    """The first ``limit`` characters (0: all) of a file, or of Python's reference."""
    if path is not None:
        content = path.read_text(encoding="utf-8")
    else:
        try:
            from pydoc_data.topics import topics
        except ImportError:
            raise SystemExit("This Python lacks its reference: pass a file with --text.") from None
        content = "\n".join(topics[name] for name in sorted(topics))
    content = content[:limit] if limit else content
    alphabet = "".join(sorted(set(content)))
    numbers = {character: number for number, character in enumerate(alphabet)}
    encoded = torch.tensor([numbers[character] for character in content])
    parts = encoded.split([len(encoded) * 9 // 10, len(encoded) - len(encoded) * 9 // 10])
    return Text(alphabet, *parts)


class Transformer(nn.Module):
    """Maps sequences of characters, int64 of shape (count, length), to scores of the next character, of shape (count,
    length, characters). The attention is causal: a position depends on earlier positions only."""

    def __init__(self, characters: int, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                4,
                4 * width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, characters)
        for table in (self.characters, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.characters(x) + self.positions(torch.arange(length))
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.scores(self.norm(x))


def sequences(text: torch.Tensor, length: int, seed: int | None = None) -> torch.Tensor:
    """This process's share of the training sequences of a text, of shape (count, length + 1). The first ``length``
    characters of a sequence are the input, the last ``length`` are the targets.

    With a seed, the sequences start at a random offset and are shuffled, in the same way on all processes. All
    processes get the same number of sequences."""
    random = torch.Generator().manual_seed(seed or 0)
    start = 0 if seed is None else int(torch.randint(length, (), generator=random))
    found = text[start:].unfold(0, length + 1, length)
    if seed is not None:
        found = found[torch.randperm(len(found), generator=random)]
    return found[: len(found) - len(found) % hvd.size()][hvd.rank() :: hvd.size()]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def total(*values: float) -> list[float]:
    """Sums over all processes."""
    return hvd.allreduce(torch.tensor(values, dtype=torch.float64), op=hvd.Sum).tolist()


def validate(model: Transformer, text: Text) -> float:
    """Bits per character on the validation text; each process evaluates its share of the sequences."""
    model.eval()
    loss_sum, seen = 0.0, 0
    with torch.no_grad():
        for batch in sequences(text.validation, model.context).split(64):
            loss_sum += loss_of(model, batch).item() * len(batch)
            seen += len(batch)
    all_loss, all_seen = total(loss_sum, seen)
    return all_loss / all_seen / math.log(2)


def schedule(step: int, warm_up: int, steps: int) -> float:
    """The learning rate at a step, as a share of the highest."""
    return min((step + 1) / (warm_up + 1), (steps - step) / max(steps - warm_up, 1))


def write(model: Transformer, text: Text, start: str, length: int) -> str:
    """Let the model continue the text ``start``."""
    model.eval()
    written = [text.alphabet.find(character) for character in start if character in text.alphabet]
    written = written or [0]
    chosen = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(length):
            scores = model(torch.tensor([written[-model.context :]]))[0, -1]
            likely = F.softmax(scores / 0.8, dim=0)  # a temperature of 0.8
            written.append(int(torch.multinomial(likely, 1, generator=chosen)))
    return text.decode(torch.tensor(written))


def train(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    text: Text,
    args: argparse.Namespace,
    epoch: int,
) -> dict[str, float]:
    """One pass over the text; returns bits per character, and characters per second of all processes."""
    model.train()
    loss_sum, seen, started = 0.0, 0, time.perf_counter()
    steps = list(sequences(text.train, args.context, args.seed + epoch).split(args.batch_size))
    highest = args.lr * math.sqrt(hvd.size())
    shown: Iterable[torch.Tensor] = steps
    if tqdm is not None and hvd.rank() == 0:
        shown = tqdm(steps, desc=f"epoch {epoch + 1}/{args.epochs}", unit="batch", leave=False)
    for step, batch in enumerate(shown, epoch * len(steps)):
        for group in optimizer.param_groups:
            group["lr"] = highest * schedule(step, args.warmup_steps, args.epochs * len(steps))
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        # Clipping applies to the averaged gradients: wait for them here, and skip the wait in step().
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        with optimizer.skip_synchronize():
            optimizer.step()
        loss_sum += loss.item() * len(batch)
        seen += len(batch)
    rate = seen * args.context / (time.perf_counter() - started)
    all_loss, all_seen, all_rate = total(loss_sum, seen, rate)
    return {"bits": all_loss / all_seen / math.log(2), "rate": all_rate}


def resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint, if there is one. Returns the number of epochs that were trained before it."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epochs"]


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epochs}
    new = path.with_name(path.name + ".new")
    torch.save(state, new)
    os.replace(new, path)  # so that the file is always a complete checkpoint


def main(arguments: list[str] | None = None) -> Transformer:
    """The whole program; returns the trained model."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--epochs", type=int, default=4, help="passes over the text")
    add("--batch-size", type=int, default=16, help="sequences per process and step")
    add("--context", type=int, default=64, help="characters in a sequence")
    add("--width", type=int, default=64, help="width of the model; a multiple of 4")
    add("--layers", type=int, default=2, help="layers of the model")
    add("--lr", type=float, default=3e-3, help="learning rate of one process")
    add("--warmup-steps", type=int, default=50, help="steps in which the learning rate rises")
    add("--clip", type=float, default=1.0, help="maximum norm of the gradients")
    add(
        "--compression",
        choices=["none", "fp16", "bf16"],
        default="none",
        help="dtype in which gradients are sent",
    )
    add("--text", type=Path, help="file with the text in UTF-8; default: Python's reference")
    add("--max-characters", type=int, default=0, help="maximum length of the text; 0: all of it")
    add("--checkpoint", type=Path, help="file to save each epoch in and to continue from")
    add("--sample", type=int, default=300, help="number of characters to write at the end")
    add("--seed", type=int, default=1, help="seed of all random numbers")
    add("--threads", type=int, help="threads per process; default: its share of the cores")
    args = parser.parse_args(arguments)

    hvd.init()

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(args.threads or max(1, cores // hvd.local_size()))
    torch.manual_seed(args.seed)
    text = load(args.text, args.max_characters)
    if len(text.validation) <= args.context * hvd.size():
        raise SystemExit(
            f"A text of {len(text.train) + len(text.validation)} characters is too short for "
            f"{hvd.size()} process(es) with --context {args.context}."
        )
    model = Transformer(len(text.alphabet), args.context, args.width, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    epochs_seen = 0
    if args.checkpoint and hvd.rank() == 0:
        epochs_seen = resume(args.checkpoint, model, optimizer)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, args.compression),
    )
    # Only rank 0 has read the checkpoint, and broadcasts its contents to the other ranks.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    epochs_seen = hvd.broadcast_object(epochs_seen, root_rank=0)

    say = print if hvd.rank() == 0 else lambda *_, **__: None
    say(
        f"{len(text.train):,} characters of text, {sum(p.numel() for p in model.parameters()):,} "
        f"parameters, {hvd.size()} process(es)",
        flush=True,
    )
    for epoch in range(epochs_seen, args.epochs):
        result = train(model, optimizer, text, args, epoch)
        bits = validate(model, text)
        say(
            f"epoch {epoch + 1}/{args.epochs}: {result['bits']:.3f} bits per character, "
            f"validation {bits:.3f}, {result['rate']:,.0f} characters/s in total",
            flush=True,
        )
        if args.checkpoint and hvd.rank() == 0:
            save(args.checkpoint, model, optimizer, epoch + 1)
    if args.sample and hvd.rank() == 0:
        say(f"---\n{write(model, text, 'The ', args.sample)}", flush=True)
    return model


if __name__ == "__main__":
    main()
