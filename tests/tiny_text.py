"""Tiny random text encoders on disk, as transformers saves them: CLIP's, T5's, and a sentence encoder."""

import json
from pathlib import Path

import pytest
import torch

WORDS = "a red apple cut open woman firefighter man with hat".split()
SPECIAL = ("<pad>", "<unk>", "<begin>", "<end>")
WIDTH = 32


def save_encoder(folder: Path, kind: str, places: int = 12, width: int = WIDTH) -> Path:
    """A folder of one: kind clip, t5 or bert; places is how many tokens CLIP and BERT take."""
    pytest.importorskip("transformers", reason="pip install -r requirements-text.txt")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    around = {"clip": "<begin> $A <end>", "bert": "<begin> $A <end>", "t5": "$A <end>"}[kind]
    special = [(token, vocabulary[token]) for token in ("<begin>", "<end>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(vocabulary), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": width, "intermediate_size": 64}
    model = {
        "clip": lambda: CLIPTextModel(CLIPTextConfig(**sizes, **layers, max_position_embeddings=places)),
        "bert": lambda: BertModel(BertConfig(**sizes, **layers, max_position_embeddings=places)),
        "t5": lambda: T5EncoderModel(T5Config(**sizes, d_model=width, d_kv=16, d_ff=64, num_layers=2, num_heads=2)),
    }[kind]()
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    limit = {} if kind == "t5" else {"model_max_length": places}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "unk_token": "<unk>", **limit}
    (folder / "tokenizer_config.json").write_text(json.dumps(about | {"eos_token": "<end>"}))
    return folder
