"""What a model's forward calls its cache: Transformers renamed it."""

import inspect

from transformers import PreTrainedModel


def cache_argument(model: PreTrainedModel) -> str:
    """`cache` where the model's forward takes that name, else `past_key_values`."""
    accepted = inspect.signature(model.forward).parameters
    return "cache" if "cache" in accepted else "past_key_values"
