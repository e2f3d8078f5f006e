"""Make the tiny model of the quickstart: a Qwen3 of 0.34 M parameters that sorts four digits, but samples
badly.

It imitates a noisy teacher, who gives the sorted digits in 30 % of the answers and a random order of the same
digits in the others. So the most likely answer is nearly always right, while a sample at temperature 1 is
right about one time in three, by construction.

Usage: python examples/quickstart/make_model.py [FOLDER] [--experts N]

FOLDER is examples/quickstart/model unless given; about 40 CPU-seconds. With experts it is a Qwen3-MoE that
sends each token through two of N.
"""

import argparse
import random
from pathlib import Path

import torch
from task import eval_rows, train_rows
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

CHARACTERS = "_^$=0123456789"  # padding, begin, end, then the text
PAD, BEGIN, END = 0, 1, 2
TEACHER_ACCURACY = 0.3
STEPS, BATCH, LEARNING_RATE = 500, 128, 2e-3
ANSWER_TOKENS = 5  # four digits and END
BALANCE = 0.01  # weight of the experts' load-balancing term


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character; nothing is added to a text."""
    tokenizer = Tokenizer(
        models.WordLevel({character: index for index, character in enumerate(CHARACTERS)}, unk_token="_")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="_",
        unk_token="_",
        bos_token="^",
        eos_token="$",
        model_max_length=64,
        padding_side="left",
    )


def build_model(num_experts: int = 0) -> PreTrainedModel:
    """Return the untrained model: an even number of layers, KV heads and experts, so that TP 2, PP 2 and EP 2
    divide it.
    """
    shape = {
        "vocab_size": len(CHARACTERS),
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    if not num_experts:
        return Qwen3ForCausalLM(Qwen3Config(**shape))
    experts = {
        "num_experts": num_experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "output_router_logits": True,  # the loss of imitation holds the load-balancing term
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))


def encode(text: str) -> list[int]:
    """Return the token ids of `text`, by the table the tokenizer uses."""
    return [CHARACTERS.index(character) for character in text]


def teacher_answer(answer: str, draws: random.Random) -> str:
    """Return the answer, or, in 70 % of the calls, its digits in a random order."""
    if draws.random() < TEACHER_ACCURACY:
        return answer
    return "".join(draws.sample(answer, len(answer)))


def draw_batch(rows: list[dict], draws: random.Random) -> Tensor:
    """Return int64 [BATCH, 6 + ANSWER_TOKENS]: prompts with the teacher's answers."""
    chosen = draws.choices(rows, k=BATCH)
    return torch.tensor(
        [encode(row["prompt"] + teacher_answer(row["answer"], draws) + "$") for row in chosen]
    )


def train(model: PreTrainedModel, rows: list[dict]) -> None:
    """Imitate the teacher: cross-entropy of the answer tokens, with experts the load-balancing term too."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    draws = random.Random(0)
    for step in range(STEPS):
        tokens = draw_batch(rows, draws)
        output = model(input_ids=tokens)
        logits = output.logits[:, -ANSWER_TOKENS - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, -ANSWER_TOKENS:].flatten())
        if (balance := getattr(output, "aux_loss", None)) is not None:
            loss = loss + BALANCE * balance
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} of {STEPS}: loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def compute_accuracy(model: PreTrainedModel, rows: list[dict]) -> tuple[float, float]:
    """Return the mean probability of the right answer (what sampling at temperature 1 scores on average)
    and the greedy accuracy.
    """
    tokens = torch.tensor([encode(row["prompt"] + row["answer"] + "$") for row in rows])
    logits = model(input_ids=tokens).logits[:, -ANSWER_TOKENS - 1 : -1]
    answers = tokens[:, -ANSWER_TOKENS:]
    probabilities = logits.log_softmax(-1).gather(2, answers[..., None]).sum(dim=(1, 2)).exp()
    greedy = (logits.argmax(-1) == answers).all(dim=1)
    return probabilities.mean().item(), greedy.float().mean().item()


def main() -> None:
    """Train the model on the noisy teacher's answers and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--experts", type=int, default=0, metavar="N")
    options = parser.parse_args()
    folder = options.folder
    torch.set_num_threads(1)  # one thread: the sums, and so the weights, are the same on every run
    torch.manual_seed(0)
    model = build_model(options.experts)
    train(model, train_rows())
    model.eval()
    if options.experts:
        model.config.output_router_logits = False  # for the imitation alone
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    sampled, greedy = compute_accuracy(model, eval_rows())
    print(
        f"{folder}: {model.num_parameters():,} parameters; held-out accuracy sampled {sampled:.3f}, "
        f"greedy {greedy:.3f}"
    )


if __name__ == "__main__":
    main()
