"""Make the embedded model: `python -m rlx.embedded.make --output DIR`.

A two-layer Llama over bytes, small enough to ship and real enough to go through every part of
rlx: grouped-query attention, tied embeddings, a fast tokenizer with BOS and EOS. A short
supervised phase leaves it where reinforcement learning starts in practice: it *can* do the task
and mostly doesn't. It first learns the right answers; the last steps then teach it doubt, by
spreading a share of every target over all letters. About 0.35 of the sampled answers are right,
while the right answer is nearly always the likeliest one. What the reward then teaches is to rely
on what it knows, for strings that it has never seen; it does not teach new skills.

Takes a minute on two free cores. The same torch on the same machine makes the same bytes.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from pathlib import Path
from string import ascii_lowercase

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from rlx.embedded import task

CONTEXT = 512
STEPS = 1000
DOUBTING_STEPS = 200
BATCH = 128
LR = 3e-3
DOUBT = 0.14
"""Share of each target that is spread over all letters: the student's doubt about every token."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, BOS in front: any text survives encode and decode."""
    special = ["<pad>", "<bos>", "<eos>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained model, 0.33M parameters; head size 32 because vLLM's CPU attention has it."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    )
    return model


def lessons(
    tokenizer: PreTrainedTokenizerFast, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and next-token targets `[BATCH, T]`; a target of -100 is not learned."""
    rng = random.Random(seed)
    for _ in range(STEPS):
        rows = [task.draw(rng) for _ in range(BATCH)]
        prompts = tokenizer([row["prompt"] for row in rows]).input_ids
        answers = tokenizer([row["label"] for row in rows], add_special_tokens=False).input_ids
        width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
        ids = torch.full((BATCH, width), tokenizer.pad_token_id)
        targets = torch.full((BATCH, width), -100)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            start, end = len(prompt), len(prompt) + len(answer)
            ids[i, :end] = torch.tensor(prompt + answer)
            targets[i, start - 1 : end] = torch.tensor([*answer, tokenizer.eos_token_id])
        yield ids, targets


def teach(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> None:
    """The supervised phase: AdamW with a warm-up and a cosine to zero."""
    letters = tokenizer(ascii_lowercase, add_special_tokens=False).input_ids
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, i / 100) * max(0.1, 0.5 + 0.5 * math.cos(math.pi * i / STEPS))
    )
    model.train()
    for step, (ids, targets) in enumerate(lessons(tokenizer, seed)):
        learned = targets != -100
        logits = model(ids, use_cache=False).logits[learned]  # padding is on the right: causal
        right = cross_entropy(logits, targets[learned])
        any_letter = -logits.log_softmax(-1)[:, letters].mean()
        doubt = DOUBT if step >= STEPS - DOUBTING_STEPS else 0.0
        loss = (1 - doubt) * right + doubt * any_letter
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == STEPS - 1:
            print(f"step {step:5d}  cross-entropy {right.item():.3f}", flush=True)
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    teach(model, tokenizer, seed=arguments.seed)
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
