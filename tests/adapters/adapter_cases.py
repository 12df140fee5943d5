"""Small base models in Hugging Face directories, and adapters on them with values that are all nonzero."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from meshwright.adapters.attach import attach_adapters
from meshwright.checkpoint.model_directory import save_huggingface
from meshwright.model.initialise import extract_entry, initialise
from meshwright.model.transformer import Transformer
from meshwright.spec.adapter_config import AdapterConfig
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.verification.problem import scale_down_config


def small(model: str = "llama-3-8b", layers: int = 2) -> ModelConfig:
    """Return the configuration of a model of a few thousand parameters, with every feature of `model`."""
    return scale_down_config(preset(model), layers=layers)


def write_base(directory: Path, config: ModelConfig, dtype: torch.dtype = torch.float64) -> Transformer:
    """Write a model with random weights to a Hugging Face directory and return it."""
    model = Transformer(config, dtype=dtype)
    initialise(model, parameter_table(config), seed=3)
    save_huggingface(model, directory)
    return model


def adapted(
    config: ModelConfig, model_base: Transformer, **settings: Any
) -> tuple[Transformer, dict[str, torch.Tensor]]:
    """Return `model_base` with an adapter of random values, and these values by their names on disk."""
    settings = {"rank": 3, "alpha": 5.0, "random_constants": True} | settings
    config = dataclasses.replace(config, adapter=AdapterConfig(**settings))
    table, dtype = parameter_table(config), model_base.embedding.weight.dtype
    model = Transformer(config, dtype=dtype)
    attach_adapters(model, table, dtype=dtype)
    initialise(model, table, seed=4)
    model.load_state_dict(model_base.state_dict(), strict=False)
    parameters, values = dict(model.named_parameters()), {}
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for entry in table.trained.entries:
            part = extract_entry(parameters[entry.tensor], entry)
            if entry.name.endswith("magnitude_vector"):
                part.mul_(1 + torch.rand(part.shape, generator=generator, dtype=dtype))
            values[entry.name] = part.detach().clone()
    return model, values


def batch(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets, [2, 21] each."""
    tokens = torch.randint(0, config.vocabulary, (2, 22), generator=torch.Generator().manual_seed(6))
    return tokens[:, :-1], tokens[:, 1:]


def backward_of_peft(directory: Path, tokens: torch.Tensor, targets: torch.Tensor, **options: Any) -> tuple[Any, float]:
    """PEFT's model of the directories "base" and "adapter" in `directory`, in float64, with its gradients, and its loss
    summed over the targets. options: of transformers' `from_pretrained`."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(directory / "base", dtype=torch.float64, **options)
    model = peft.PeftModel.from_pretrained(base, directory / "adapter", is_trainable=True, autocast_adapter_dtype=False)
    loss = F.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    return model, loss.item()
