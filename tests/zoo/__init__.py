"""At least fifteen small real models with random weights; see registry.py for what each must be."""

from tests.zoo import (  # noqa: F401  (importing a family declares its models)
    audio,
    convnets,
    custom_functions,
    decoders,
    diffusion,
    encoder_decoders,
    encoders,
    multimodal,
    recurrent,
    vision_transformers,
)
from tests.zoo.registry import ZOO, ZooEntry, ZooModel

__all__ = ["ZOO", "ZooEntry", "ZooModel"]
