"""Two tiny models with random weights, made on the spot with the transformers of the server's own environment.

python models.py FOLDER      writes FOLDER/dense (Llama) and FOLDER/hybrid (Qwen3-Next: Gated DeltaNet and attention)
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCABULARY = 512
END, START, PAD = "<end>", "<start>", "<pad>"
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}  # fmt: skip

DENSE = LlamaConfig(num_hidden_layers=4, num_attention_heads=8, head_dim=32, max_position_embeddings=8192, **SHAPE)
HYBRID = Qwen3NextConfig(
    num_hidden_layers=8, num_attention_heads=4, head_dim=64, max_position_embeddings=32768, full_attention_interval=4,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, shared_expert_intermediate_size=128, **SHAPE,
)  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own = Tokenizer(models.BPE())
    own.pre_tokenizer, own.decoder = bytes_, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    own.train_from_iterator([Path(__file__).read_text()] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token=PAD, bos_token=START, eos_token=END)


def write(folder: Path, model_class: type, config: object) -> None:
    torch.manual_seed(1)
    model_class(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write(target / "dense", LlamaForCausalLM, DENSE)
    write(target / "hybrid", Qwen3NextForCausalLM, HYBRID)
