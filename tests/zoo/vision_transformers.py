"""Vision transformers: plain, windowed (roll, gather by index, relative positions) and hierarchical with a decoder."""

from __future__ import annotations

import torch

from tests.zoo.registry import ZooModel, classes, from_output, generator, images, zoo_model


@zoo_model("vit")
def vit() -> ZooModel:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=48,
        patch_size=6,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=10,
    )
    model = ViTForImageClassification(config)
    return from_output(
        model, lambda i: {"pixel_values": images(i, 12, 48), "labels": classes(i, 12)}
    )


@zoo_model("swin")
def swin() -> ZooModel:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=64,
        patch_size=4,
        embed_dim=32,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        drop_path_rate=0.1,
        num_labels=10,
    )
    model = SwinForImageClassification(config)
    return from_output(
        model, lambda i: {"pixel_values": images(i, 12, 64), "labels": classes(i, 12)}
    )


@zoo_model("segformer")
def segformer() -> ZooModel:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        num_encoder_blocks=3,
        depths=[2, 2, 1],
        sr_ratios=[4, 2, 1],
        hidden_sizes=[16, 24, 32],
        patch_sizes=[7, 3, 3],
        strides=[4, 2, 2],
        num_attention_heads=[1, 2, 4],
        mlp_ratios=[2, 2, 2],
        decoder_hidden_size=32,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        classifier_dropout_prob=0.1,
        drop_path_rate=0.1,
        num_labels=5,
    )
    model = SegformerForSemanticSegmentation(config)

    def batch(i: int) -> dict[str, torch.Tensor]:
        labels = torch.randint(0, 5, (8, 64, 64), generator=generator(i + 40))
        return {"pixel_values": images(i, 8, 64), "labels": labels}

    return from_output(model, batch)
